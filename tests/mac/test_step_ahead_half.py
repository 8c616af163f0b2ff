"""Tests of batches, joins, ends, forks, slot files and agents again, a step ahead in bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstack.core.preset import SlotSpec
from mlxstack.engine.decode import attention_patch
from mlxstack.engine.loading import loader
from tests.conftest import ModelOf
from tests.engine.conftest import eager_stacks, padded_rows, step_ahead
from tests.engine.harness import Driver, preset_of, running
from tests.engine.test_batch_equals_alone import (
    test_e1_joining_one_by_one_equals_alone,
    test_e2_one_forward_for_all_rows,
    test_z3_rows_of_different_kv_precision_in_one_batch,
    test_z4_seeds_penalties_and_bias_stay_in_the_batch,
)
from tests.mac.step_ahead_run import run_ahead
from tests.models import build

__all__ = [
    "eager_stacks",
    "padded_rows",
    "step_ahead",
    "test_e1_joining_one_by_one_equals_alone",
    "test_e2_one_forward_for_all_rows",
    "test_z3_rows_of_different_kv_precision_in_one_batch",
    "test_z4_seeds_penalties_and_bias_stay_in_the_batch",
]
"""Fixtures and tests of the engine that pytest finds here too."""

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

ENGINE = "tests/engine/test_"
PATHS = (
    f"{ENGINE}batch_equals_alone.py",
    f"{ENGINE}conversations_and_slots.py",
    f"{ENGINE}memory.py::test_g10_parked_and_resumed_goes_on_as_if_alone",
    f"{ENGINE}memory.py::test_d3_two_agents_hold_a_shared_head_once",
    f"{ENGINE}ends.py",
    f"{ENGINE}guided_rows.py",
    f"{ENGINE}keeping.py",
    f"{ENGINE}serving.py",
    f"{ENGINE}slot_files.py",
)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelOf]:
    """Tiny models in half precision, which is not widened, with the attention of GPUs."""
    root = tmp_path_factory.mktemp("half")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else build(path, kind, dtype=mx.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        for module in (loader, attention_patch):
            patch.setattr(module, "has_gpu", lambda: True)
        yield folder


@pytest.fixture(scope="module")
def driver(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A CPU multiplies matrices of experts in float32 only: a model without them."""
    preset = preset_of(model_of("tiny-swa"), slots=SlotSpec(count=8, n_ctx=1024))
    with running(preset, tmp_path_factory.mktemp("home")) as driver:
        assert driver.engine.snapshot().is_batching
        yield driver


@pytest.mark.soak
def test_more_engine_tests_pass_a_step_ahead_in_half_precision() -> None:
    assert run_ahead("bfloat16", PATHS, "--soak") > 60
