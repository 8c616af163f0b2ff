"""The one MLX thread, and the only room that imports mlx."""

import os

import mlx.core as mx

from mlxstack.engine.decode.attention_patch import install
from mlxstack.host.hardware import CPU_VARIABLE

install()
if os.environ.get(CPU_VARIABLE):
    mx.set_default_device(mx.cpu)
