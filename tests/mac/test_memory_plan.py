"""Active memory against the plan, after each step, over the tiny models."""

from pathlib import Path

import pytest

from mlxstack.core.preset import SlotSpec, Speculation
from mlxstack.planner.candidate import of_preset
from mlxstack.policy.memory.capacity import MARGIN_BYTES
from tests.conftest import ModelOf
from tests.engine.harness import array_bytes, draft_freely, preset_of, prompt, running
from tests.mac.test_device_budget import have_working_set
from tests.models import CONFIGS

pytestmark = pytest.mark.mlx

MIB = 2**20
KV_BYTES = 6 * MIB
TOLD = "please report it with the model"


@pytest.mark.parametrize("kind", CONFIGS)
def test_active_memory_stays_within_the_plan_after_each_step(
    kind: str,
    model_of: ModelOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = SlotSpec(count=3, n_ctx=1024)
    preset = preset_of(model_of(kind), slots=slots, speculation=Speculation.AUTO)
    load = of_preset(preset).load()
    fixed = load.weights + load.workspace + MARGIN_BYTES
    have_working_set(monkeypatch, int((fixed + KV_BYTES) / 0.96))
    before = array_bytes()
    with running(preset, tmp_path) as driver:
        draft_freely(driver)
        # The margin is not for arrays; half precision is widened on a CPU.
        weights = sum(file.stat().st_size for file in model_of(kind).glob("*.safetensors"))
        device_memory = driver.engine._device_memory
        device_memory.planned_bytes += before + weights - MARGIN_BYTES
        for n in range(4):
            asks = [driver.submit(prompt(300, seed=3 * n + i), 24) for i in range(3)]
            for ask in asks:
                driver.finish(ask)
        assert TOLD not in caplog.text
        device_memory.planned_bytes = 1
        for n in range(2):
            driver.answer(prompt(50, seed=n), 4)
        assert caplog.text.count(TOLD) == 1
