"""A pytest plugin: computes as on a GPU, as far as a CPU can; named by `test_step_ahead.py`.

MLX_STACK_TEST_AHEAD says the precision. `float32` schedules every step before the last one is
read. `bfloat16` builds the tiny models in half precision too, does not widen them, and uses the
attention of GPUs.
"""

import os
from functools import partial

import mlx.core as mx

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
import tests.models
from mlxstack.engine.decode import batch
from mlxstack.engine.model import attention_patch, loader

PRECISION = os.environ["MLX_STACK_TEST_AHEAD"]

batch.has_gpu = lambda: True
if PRECISION == "bfloat16":
    loader.has_gpu = attention_patch.has_gpu = batch.has_gpu
    tests.models.build = partial(tests.models.build, dtype=mx.bfloat16)
