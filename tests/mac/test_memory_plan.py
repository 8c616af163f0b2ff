"""Active memory against the plan, after each step, over the tiny models."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.preset import SlotSpec, Speculation
from mlxstack.engine import assembly
from mlxstack.engine.decode import batch
from mlxstack.features.row_stacks import engine as row_stack
from mlxstack.features.row_stacks.engine import RowStacker, StackedKVCache
from mlxstack.features.row_stacks.policy import StackingRules
from mlxstack.planner.candidate import of_preset
from mlxstack.policy.memory.capacity import MARGIN_BYTES
from tests.conftest import ModelOf
from tests.engine.harness import Driver, array_bytes, draft_freely, preset_of, prompt, running
from tests.mac.test_device_budget import have_working_set
from tests.models import CONFIGS
from tests.repetition import all_in_soak

pytestmark = pytest.mark.mlx

MIB = 2**20
KV_BYTES = 6 * MIB
TOLD = "please report it with the model"


EAGER = StackingRules(repaid_bytes=1 << 60, building_bytes=1, most_padding=10**6)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[StackedKVCache]:
    """Stacks that were made; rows are stacked after two steps, and steps go ahead as on a GPU."""
    stacked: list[StackedKVCache] = []

    class Noted(StackedKVCache):
        def __init__(self, caches: Sequence[Any]) -> None:
            super().__init__(caches)
            stacked.append(self)

    monkeypatch.setattr(batch, "has_gpu", lambda: True)
    monkeypatch.setattr(row_stack, "StackedKVCache", Noted)
    monkeypatch.setattr(assembly, "RowStacker", partial(RowStacker, rules=EAGER))
    return stacked


def talk(driver: Driver, seed: int, drafts: Sequence[tuple[int, ...]] = ()) -> None:
    """Three rows at once, each with a checkpoint, then a fork of each; some with `drafts`."""
    beginnings = [prompt(300, seed=seed + i) for i in range(3)]
    for tokens in (beginnings, [head[:256] + prompt(20, seed=seed) for head in beginnings]):
        predictions = drafts or [()] * 3
        asks = [
            driver.submit(token, 24, checkpoint_positions=(256,), prediction=expected)
            for token, expected in zip(tokens, predictions, strict=True)
        ]
        for ask in asks:
            driver.finish(ask)


@pytest.mark.parametrize("kind", all_in_soak(CONFIGS, "tiny-swa", "tiny-hybrid", "tiny-mla"))
def test_active_memory_stays_within_the_plan_after_each_step(
    kind: str,
    model_of: ModelOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stacks: list[StackedKVCache],
) -> None:
    slots = SlotSpec(count=3, n_ctx=1024)
    preset = preset_of(model_of(kind), slots=slots, speculation=Speculation.AUTO)
    load = of_preset(preset).load()
    fixed = load.weights + load.workspace + MARGIN_BYTES
    have_working_set(monkeypatch, int((fixed + KV_BYTES) / 0.9))
    before = array_bytes()
    with running(preset, tmp_path) as driver:
        # The margin is not for arrays; half precision is widened on a CPU.
        weights = sum(file.stat().st_size for file in model_of(kind).glob("*.safetensors"))
        device_memory = driver.engine.device_memory
        device_memory.planned_bytes += before + weights - MARGIN_BYTES
        for seed in (0, 10):
            talk(driver, seed)
        assert stacks, "no rows were stacked"
        stacks.clear()
        draft_freely(driver)
        expected = [tuple(driver.answer(prompt(300, seed=i), 24)) for i in range(3)]
        for _ in range(2):
            talk(driver, 0, expected)
        now = driver.engine.snapshot()
        assert now.counters.n_cached_tokens >= 256, "no fork began at a checkpoint"
        assert bool(now.counters.n_drafted_tokens) == now.is_drafting
        assert TOLD not in caplog.text
        device_memory.planned_bytes = 1
        for n in range(2):
            driver.answer(prompt(50, seed=n), 4)
        assert caplog.text.count(TOLD) == 1
