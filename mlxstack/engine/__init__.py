"""The one MLX thread, and the only room that imports mlx."""

import os

from mlxstack.host.command_buffers import buffer_variables
from mlxstack.host.hardware import CPU_VARIABLE

# Before MLX is imported: it reads them once, when it first uses the device.
os.environ.update(buffer_variables(os.environ))

import mlx.core as mx

from mlxstack.engine.decode.attention_patch import install

install()
if os.environ.get(CPU_VARIABLE):
    mx.set_default_device(mx.cpu)
