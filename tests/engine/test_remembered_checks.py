"""Self-checks are made once for what they depend on, and again when that changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxstack.core.preset import KVSpec
from mlxstack.engine.decode import remembered_checks
from mlxstack.engine.decode.batching_check import BatchingCheck, self_check
from mlxstack.engine.decode.remembered_checks import RememberedChecks
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.pass_layout import RowMode, SharedPrompts
from mlxstack.store.check_files import MAX_FILES, CheckFiles
from tests.conftest import ModelOf
from tests.engine.harness import preset_of

pytestmark = [pytest.mark.mlx]

Load = Callable[..., BatchingCheck]


@pytest.fixture(scope="module")
def model(model_of: ModelOf) -> LoadedModel:
    preset = preset_of(model_of("tiny"))
    return loader.load(preset.model, preset.kv, LoadProgress())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[BatchingCheck]:
    """Checks that were computed."""
    results: list[BatchingCheck] = []

    def check(*args: Any) -> BatchingCheck:
        results.append(self_check(*args))
        return results[-1]

    monkeypatch.setattr(remembered_checks, "self_check", check)
    return results


@pytest.fixture
def load(model: LoadedModel, tmp_path: Path) -> Load:
    """A check at load, by a store that is opened anew."""

    def check(of: LoadedModel = model, kv: KVSpec | None = None, **more: Any) -> BatchingCheck:
        store = CheckFiles(tmp_path / "checks")
        check_s = more.get("check_s", 60.0)
        checks = RememberedChecks(store, LoadProgress(), check_s, kv or KVSpec())
        return checks.check(of, CacheFactory(of.model, KVSpec()), None)

    return check


def test_a_second_load_has_the_same_result_without_a_check(
    load: Load, made: list[BatchingCheck]
) -> None:
    first = load()
    assert load() == first
    assert made == [first]
    assert first.is_batching


def test_other_weights_settings_devices_and_variables_are_checked(
    load: Load, model: LoadedModel, made: list[BatchingCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    identity = replace(model.facts.identity, weights="others")
    load(replace(model, facts=replace(model.facts, identity=identity)))
    load(kv=KVSpec(bits=8))
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    load()
    monkeypatch.setattr(remembered_checks, "LIBRARIES", ())
    load()
    monkeypatch.setattr(remembered_checks, "CODE", ("core",))
    load()
    assert len(made) == 6


def test_a_check_without_time_for_all_steps_is_made_again(
    load: Load, made: list[BatchingCheck]
) -> None:
    assert not load(check_s=-1.0).can_draft
    assert load().can_draft
    assert len(made) == 2


def test_a_refusal_is_not_remembered(
    load: Load, monkeypatch: pytest.MonkeyPatch, made: list[BatchingCheck]
) -> None:
    refused = BatchingCheck(RowMode.ALONE, "no memory for it", "2 full")
    with monkeypatch.context() as patch:
        patch.setattr(remembered_checks, "self_check", lambda *_: refused)
        assert load() == refused
    assert load().is_batching
    assert len(made) == 1


def test_a_measurement_is_made_once_by_name_unless_it_found_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    store = CheckFiles(tmp_path / "measured")
    made: list[str] = []

    def measured(name: str, n_tokens: int) -> SharedPrompts:
        checks = RememberedChecks(store, LoadProgress(), 60.0, KVSpec())

        def measure() -> SharedPrompts:
            made.append(name)
            return SharedPrompts(n_tokens)

        return checks.once(name, model.facts, SharedPrompts, measure, lambda x: x.max_tokens > 0)

    assert [measured("a", 0), measured("a", 32), measured("a", 64)] == [
        SharedPrompts(0),
        SharedPrompts(32),
        SharedPrompts(32),
    ]
    assert measured("b", 64).max_tokens == 64
    assert made == ["a", "a", "b"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"rows": 1}'])
def test_a_damaged_file_is_a_check(
    load: Load, made: list[BatchingCheck], tmp_path: Path, damage: bytes
) -> None:
    load()
    (file,) = (tmp_path / "checks").iterdir()
    file.write_bytes(damage)
    load()
    assert len(made) == 2


def test_files_are_private_and_the_oldest_make_room(tmp_path: Path) -> None:
    store = CheckFiles(tmp_path / "checks")
    for n in range(MAX_FILES + 3):
        store.save(f"{n:04}", b"{}")
    files = sorted((tmp_path / "checks").iterdir())
    assert len(files) == MAX_FILES
    assert files[-1].stat().st_mode & 0o777 == 0o600
    assert store.load(f"{MAX_FILES + 2:04}") == b"{}"


def test_steps_are_shown_where_a_check_is_made(
    made: list[BatchingCheck], model: LoadedModel, tmp_path: Path
) -> None:
    store = CheckFiles(tmp_path / "shown")
    steps: list[str] = []
    for _ in range(2):
        progress = LoadProgress()
        checks = RememberedChecks(store, progress, 60.0, KVSpec())
        checks.check(model, CacheFactory(model.model, KVSpec()), None)
        steps.append(progress.step)
    assert steps[0].startswith("self-check")
    assert not steps[1]
    assert len(made) == 1
