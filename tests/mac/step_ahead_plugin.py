"""A pytest plugin: computes as on a GPU, as far as a CPU can; used by `step_ahead_run`.

TESTS_AHEAD says the precision. `float32` submits every step before the last one is
read. `bfloat16` builds the tiny models in half precision too, does not widen them, and uses the
attention of GPUs.
"""

import os
from functools import partial

import mlx.core as mx
import pytest

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
import tests.models
from mlxstack.engine.decode import attention_patch, batch
from mlxstack.engine.loading import loader

PRECISION = os.environ["TESTS_AHEAD"]

batch.has_gpu = lambda: True
if PRECISION == "bfloat16":
    loader.has_gpu = attention_patch.has_gpu = batch.has_gpu
    tests.models.build = partial(tests.models.build, dtype=mx.bfloat16)

LEFT_OUT = {
    "test_adapters": "its rows decode as others do; it compares weights",
    "test_buffer_cache": "frees buffers while a model loads; no row decodes",
    "test_fetching": "downloads; no row decodes",
    "test_foreign_code": "refuses a model; no row decodes",
    "test_landing": "reads KV files into caches; no row decodes",
    "test_sampling": "samples logits without a batch",
    "test_temperatures": "samples logits without a batch",
    "test_z5_a_team_computes_its_head_once": "decodes for a minute what shorter tests decode",
    "test_z8_agents_outnumber_slots": "decodes for a minute what shorter tests decode",
    "test_c11_a_save_in_pieces_is_finished_before_a_stop": "waits 20 s for a slow disk",
}
"""Files and tests that would cost minutes or decode nothing, with the reason."""
NOT_IN_HALF = {
    "demo": "it is not built by the tests; its weights are those of the package",
    "hybrid": "a CPU multiplies matrices of experts in float32 only",
    "mla": "a CPU multiplies matrices of experts in float32 only",
    "sinks": "a CPU multiplies matrices of experts in float32 only",
    "d4_and_f8": "its bytes are those of float32",
    "drafts": "a pass of several tokens rounds otherwise than single ones",
    "rollback": "a pass of several tokens rounds otherwise than single ones",
    "what_was_compared": "4,000 tokens of prefill take a CPU a minute in bfloat16",
}
"""Kinds of models, and tests, that have no bfloat16 on a CPU, with the reason."""


def _is_left_out(item: pytest.Item) -> bool:
    name = item.nodeid.partition("::")[2]
    if PRECISION == "bfloat16" and any(word in name for word in NOT_IN_HALF):
        return True
    return any(
        f"/{left_out}.py" in item.nodeid or name.startswith(left_out) for left_out in LEFT_OUT
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `LEFT_OUT`, and in half precision `NOT_IN_HALF`; pytest counts them."""
    out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
