"""KV on disk serves loads that choose otherwise about equal bits."""

from pathlib import Path

import pytest

from mlxstack.core.engine_events import KVSource
from mlxstack.engine import assembly
from mlxstack.features.exact import engine, policy
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("limits", [(1000.0, 0.0), (0.0, 1000.0)])
def test_a_restart_finds_kv_of_another_choice_of_auto(
    limits: tuple[float, float], model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "measure_bits", engine.measure_bits)
    monkeypatch.setattr(engine, "AUTO_S", PATIENCE_S)
    preset = preset_of(model_of("tiny"))
    sources = []
    for limit in limits:
        monkeypatch.setattr(policy, "MAX_COST", limit)
        with running(preset, tmp_path) as driver:
            assert driver.engine.snapshot().exact.is_on is bool(limit)
            ask = driver.submit(prompt(300), 6, agent="bob")
            driver.finish(ask)
            sources.append(driver.seated(ask).source)
            driver.catch_up()
    assert sources == [KVSource.NONE, KVSource.DISK]
