"""Equal bits are measured once for the facts that decide them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.exact_rows import ExactBits, ExactRows
from mlxstack.core.preset import BatchSpec, KVSpec
from mlxstack.engine import assembly
from mlxstack.features.exact import engine
from mlxstack.features.exact.engine import MeasuredBits, measure_bits
from mlxstack.store.check_files import CheckFiles
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, running
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.mlx

Load = Callable[..., ExactRows]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MeasuredBits]:
    """Measurements that were made, with time for all steps."""
    results: list[MeasuredBits] = []

    def measure(*args: Any) -> MeasuredBits:
        results.append(measure_bits(*args))
        return results[-1]

    monkeypatch.setattr(assembly, "measure_bits", measure)
    monkeypatch.setattr(engine, "AUTO_S", PATIENCE_S)
    monkeypatch.setattr(engine, "ON_S", PATIENCE_S)
    return results


@pytest.fixture
def load(model_of: ModelOf, tmp_path: Path) -> Load:
    """Report of an engine that is loaded anew."""

    def loaded(model: str = "tiny", **sections: Any) -> ExactRows:
        checks = CheckFiles(tmp_path / "checks")
        preset = preset_of(model_of(model), **sections)
        with running(preset, tmp_path / "home", checks=checks) as driver:
            return driver.engine.snapshot().exact

    return loaded


@pytest.mark.parametrize("setting", [ExactBits.AUTO, ExactBits.ON])
def test_a_second_load_measures_nothing_and_reports_the_same(
    setting: ExactBits, load: Load, measured: list[MeasuredBits]
) -> None:
    first = load(batch=BatchSpec(exact=setting))
    assert load(batch=BatchSpec(exact=setting)) == first
    assert [bits.report for bits in measured] == [first]
    assert first.layers


def test_other_weights_settings_and_variables_are_measured(
    load: Load, measured: list[MeasuredBits], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    load("tiny-swa")
    load(batch=BatchSpec(exact=ExactBits.ON))
    load(batch=BatchSpec(max_size=2))
    load(kv=KVSpec(bits=8, group_size=32))
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    load()
    assert len(measured) == 6


def test_a_measurement_without_time_for_all_steps_is_made_again(
    load: Load, measured: list[MeasuredBits], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "AUTO_S", -1.0)
        assert "no time" in load().reason
    assert load().layers
    load()
    assert [bits.is_complete for bits in measured] == [False, True]


def test_a_failed_measurement_is_made_again(
    load: Load, measured: list[MeasuredBits], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> ExactRows:
        raise ValueError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(engine.ExactMeasurement, "measured", fail)
        assert "no such kernel" in load().reason
    assert "no such kernel" not in load().reason
    assert len(measured) == 2


def test_a_damaged_file_is_a_measurement(
    load: Load, measured: list[MeasuredBits], tmp_path: Path
) -> None:
    load()
    for file in (tmp_path / "checks").iterdir():
        file.write_bytes(b"{}")
    load()
    assert len(measured) == 2


def test_off_is_not_kept(load: Load, measured: list[MeasuredBits]) -> None:
    for _ in range(2):
        assert load(batch=BatchSpec(exact=ExactBits.OFF)).reason == "batch.exact is off"
    assert [bits.shapes for bits in measured] == [(), ()]
