"""Limits of MLX on a device with a working set: set once a model is loaded, restored at unload."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import DeviceSpec, ModelSpec, Preset, ServiceKind, SlotSpec, Wired
from mlxstack.engine.decode import remembered_checks
from mlxstack.engine.embedding_engine import EmbeddingEngine
from mlxstack.engine.loading import loader
from mlxstack.host.hardware import buffer_cache_limit
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, array_bytes, preset_of, prompt, running
from tests.mac.residency import Residency
from tests.patience import wait_until

pytestmark = pytest.mark.mlx

GIB = 2**30
WORKING_SET = 16 * GIB
BEFORE = {"set_wired_limit": 0, "set_memory_limit": 24 * GIB, "set_cache_limit": 23 * GIB}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The order of loads, limits, synchronizations and ends of streams; Metal's part is faked."""
    recorded: list[tuple[str, int]] = []
    facts = {"device_name": "M", "max_recommended_working_set_size": WORKING_SET}
    monkeypatch.setattr(mx, "device_info", lambda *_: facts)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    for name, before in BEFORE.items():
        monkeypatch.setattr(mx, name, _limit(recorded, name, before))
    for name in ("synchronize", "clear_streams"):
        monkeypatch.setattr(mx, name, _call(recorded, name, getattr(mx, name)))
    monkeypatch.setattr(loader, "load", _call(recorded, "load", loader.load))
    return recorded


def _limit(recorded: list[tuple[str, int]], name: str, before: int) -> Any:
    limits = [before]

    def set_limit(n_bytes: int) -> int:
        recorded.append((name, n_bytes))
        limits.append(n_bytes)
        return limits[-2]

    return set_limit


def _call(recorded: list[tuple[str, int]], name: str, original: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        done = original(*args, **options)
        recorded.append((name, 0))
        return done

    return call


SET = [
    ("load", 0),
    ("set_cache_limit", buffer_cache_limit(WORKING_SET)),
    ("set_memory_limit", WORKING_SET),
]
RESTORED = [
    ("synchronize", 0),
    ("set_memory_limit", BEFORE["set_memory_limit"]),
    ("set_cache_limit", BEFORE["set_cache_limit"]),
    ("clear_streams", 0),
]
WEIGHTS = DeviceSpec(wired=Wired.WEIGHTS)


def last_calls(calls: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The calls from the last kernel on; buffers may be freed before the streams end."""
    recorded = list(calls)
    while recorded[-2] == ("synchronize", 0):
        del recorded[-2]
    return recorded[-len(RESTORED) :]


def test_limits_are_set_after_the_load_and_restored_after_the_last_kernel(
    calls: list[tuple[str, int]], model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        driver.answer(prompt(20), 4)
        assert calls[: len(SET)] == SET
        assert not set(RESTORED) & set(calls[len(SET) :]) - {("synchronize", 0)}
    assert last_calls(calls) == RESTORED


def test_limits_are_restored_when_the_model_fails_its_self_check(
    calls: list[tuple[str, int]], model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise SetupError("it cannot run")

    monkeypatch.setattr(remembered_checks, "self_check", fail)
    with pytest.raises(SetupError), running(preset_of(model_of("tiny")), tmp_path) as _:
        pass
    _wait_for(calls, "clear_streams")
    assert last_calls(calls) == RESTORED


@pytest.mark.parametrize("wired", Wired)
def test_an_engine_that_serves_changes_no_wired_set(
    wired: Wired, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    residency = Residency()
    residency.watch(monkeypatch, WORKING_SET)
    slots = SlotSpec(count=2, n_ctx=1024)
    device = DeviceSpec(wired=wired)
    preset = preset_of(model_of("tiny"), slots=slots, device=device)
    n_before = array_bytes()
    for _ in range(2):
        with running(preset, tmp_path) as driver:
            weights = residency.limit
            for n in range(4):
                asks = [driver.submit(prompt(90 + n, seed=2 * n + i), 12) for i in range(2)]
                for ask in asks:
                    driver.finish(ask)
            driver.engine.cache.clear().result(WAIT_S)
            assert residency.limit == weights
    assert residency.n_changes == 0
    n_bytes = sum(file.stat().st_size for file in model_of("tiny").glob("*.safetensors"))
    if wired is Wired.OFF:
        assert residency.limits == []
    else:
        wired_bytes, unwired, *again = residency.limits
        # On a CPU half precision is widened.
        assert n_bytes / 2 < wired_bytes - n_before < 3 * n_bytes
        assert unwired == 0
        assert [min(again), len(again)] == [0, 2]


def test_a_limit_above_the_weights_changes_wired_sets(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    residency = Residency()
    residency.watch(monkeypatch, WORKING_SET)
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        mx.set_wired_limit(WORKING_SET)
        driver.answer(prompt(90), 8)
        assert residency.n_changes > 0
        mx.set_wired_limit(0)


def test_an_embedding_model_is_wired_until_it_is_dropped(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = Residency()
    residency.watch(monkeypatch, WORKING_SET)
    model = ModelSpec(id=str(model_of("tiny")))
    engine = EmbeddingEngine(Preset(model=model, kind=ServiceKind.EMBEDDING, device=WEIGHTS))
    engine.start().result(WAIT_S)
    assert residency.limit > 0
    engine.embed(((1, 2, 3),)).result(WAIT_S)
    engine.stop(0).result(WAIT_S)
    assert (residency.limit, residency.n_changes) == (0, 0)


def test_limits_of_an_embedding_model_are_set_and_restored(
    calls: list[tuple[str, int]], model_of: ModelOf
) -> None:
    preset = Preset(model=ModelSpec(id=str(model_of("tiny"))), kind=ServiceKind.EMBEDDING)
    engine = EmbeddingEngine(preset)
    engine.start().result(WAIT_S)
    assert calls[: len(SET)] == SET
    engine.stop(0).result(WAIT_S)
    assert last_calls(calls) == RESTORED


@pytest.mark.parametrize("kind", [ServiceKind.CHAT, ServiceKind.EMBEDDING])
def test_streams_end_after_the_last_kernel_on_a_cpu(
    kind: ServiceKind, model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[str, int]] = []
    for name in ("synchronize", "clear_streams", "set_wired_limit", "set_memory_limit"):
        monkeypatch.setattr(mx, name, _call(recorded, name, getattr(mx, name)))
    if kind is ServiceKind.CHAT:
        with running(preset_of(model_of("tiny")), tmp_path) as driver:
            driver.answer(prompt(20), 4)
    else:
        preset = Preset(model=ModelSpec(id=str(model_of("tiny"))), kind=kind)
        engine = EmbeddingEngine(preset)
        engine.start().result(WAIT_S)
        engine.stop(0).result(WAIT_S)
    assert recorded[-2:] == [("synchronize", 0), ("clear_streams", 0)]
    assert {name for name, _ in recorded} == {"synchronize", "clear_streams"}


def _wait_for(calls: list[tuple[str, int]], name: str) -> None:

    wait_until(lambda: calls[-1][0] == name)
