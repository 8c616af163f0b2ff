"""Weights of an idle GPU are kept warm; `has_gpu`, mains and time are imitated."""

import queue
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten
from msgspec.structs import replace

from mlxstack.client.types import PropsResponse
from mlxstack.core.preset import DeviceSpec, ModelSpec, Preset, ServerSpec
from mlxstack.engine import idle_wait
from mlxstack.engine.idle_wait import IdleWait, Message
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.policy import keep_warm
from mlxstack.policy.keep_warm import INTERVAL_S
from tests.api.running import running as running_service
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.mlx

PASS_S = 0.02
PROMPTS = [prompt(100, seed) for seed in range(3)]


class Inbox:
    """Messages that come at set times; waiting lets the clock go on."""

    def __init__(self, *due: float) -> None:
        self.now = 0.0
        self.due = list(due)

    def clock(self) -> float:
        return self.now

    def empty(self) -> bool:
        return not self.due or self.due[0] > self.now

    def get(self, timeout: float | None) -> Message:
        if self.due and (timeout is None or self.due[0] <= self.now + timeout):
            self.now = max(self.now, self.due.pop(0))
            return lambda: None
        assert timeout is not None, "nothing would ever come"
        self.now += timeout
        raise queue.Empty


class Scene:
    """Idle work over the loop of a real engine, with an imitated clock."""

    def __init__(self, driver: Driver, keep_warm_s: float, *due: float) -> None:
        self.inbox = Inbox(*due)
        self.began: list[float] = []
        self.is_powered = True
        self.published: list[int] = []
        self.error: Exception | None = None
        self._loop = driver.engine.loaded.loop
        self.work = IdleWait(
            self._loop,
            self._compute,
            keep_warm_s,
            lambda: self.published.append(self._loop.stats.counters.n_warm_passes),
            is_powered=lambda: self.is_powered,
            clock=self.inbox.clock,
        )

    def next_message(self) -> None:
        self.work.next_message(cast("queue.SimpleQueue[Message]", self.inbox))

    def _compute(self) -> None:
        self.began.append(self.inbox.now)
        self.inbox.now += PASS_S
        if self.error is not None:
            raise self.error


@pytest.fixture
def driver(model_of: ModelOf, tmp_path: Path) -> Any:
    """An engine that has answered once."""
    with running(preset_of(model_of("tiny")), tmp_path) as running_driver:
        running_driver.answer(PROMPTS[0], 4)
        running_driver.catch_up()
        yield running_driver


def test_an_idle_engine_computes_every_half_second_until_the_end(driver: Driver) -> None:
    scene = Scene(driver, 3.0, 100.0)
    scene.next_message()
    gaps = [b - a for a, b in zip(scene.began, scene.began[1:], strict=False)]
    assert len(scene.began) == 5
    assert scene.began[0] == pytest.approx(INTERVAL_S)
    assert gaps == pytest.approx([INTERVAL_S + PASS_S] * 4)
    assert scene.published == [1, 2, 3, 4, 5]
    scene.inbox.due = [300.0]
    scene.next_message()
    assert len(scene.began) == 5, "a message that is no request makes nothing hot"


def test_a_message_is_read_before_a_pass_that_is_due(driver: Driver) -> None:
    scene = Scene(driver, 60.0, INTERVAL_S, INTERVAL_S)
    scene.next_message()
    scene.next_message()
    assert not scene.began
    assert scene.inbox.now == INTERVAL_S


@pytest.mark.parametrize("busy", ["has_work", "is_busy", "is_holding"])
def test_no_pass_is_made_beside_other_work(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    scene = Scene(driver, 60.0, 30.0)
    loop = driver.engine.loaded.loop
    monkeypatch.setattr(type(loop), busy, property(lambda self: True))
    scene.next_message()
    assert not scene.began
    monkeypatch.undo()
    scene.inbox.due = [31.0]
    scene.next_message()
    assert scene.began


def test_no_pass_is_made_on_battery_or_under_pressure(driver: Driver) -> None:
    scene = Scene(driver, 60.0, 30.0)
    scene.is_powered = False
    scene.next_message()
    assert not scene.began
    scene.is_powered = True
    scene.inbox.due = [32.0]
    scene.next_message()
    assert len(scene.began) == 4, "the charger was plugged in"


def test_nothing_is_computed_before_the_first_request(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as fresh:
        scene = Scene(fresh, 60.0, 100.0)
        scene.next_message()
    assert not scene.began


def test_freed_buffers_of_the_passes_go_at_the_end(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(driver, 2.0, 100.0)
    released: list[float] = []

    def release() -> None:
        released.append(scene.inbox.now)

    monkeypatch.setattr(driver.engine.loaded.loop, "release_buffers", release)
    scene.next_message()
    assert len(released) == 1 and released[0] > scene.began[-1]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such shape"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"),
    ],
    ids=["a shape", "the GPU"],
)
def test_after_an_error_the_next_request_resumes_the_passes(
    driver: Driver, error: Exception
) -> None:
    scene = Scene(driver, 60.0, 30.0)
    scene.error = error
    scene.next_message()
    assert len(scene.began) == 1
    scene.inbox.due = [60.0]
    scene.error = None
    scene.next_message()
    assert len(scene.began) == 1
    driver.answer(PROMPTS[1], 2)
    driver.catch_up()
    scene.inbox.due = [62.0]
    scene.next_message()
    assert len(scene.began) > 1


@pytest.mark.net
def test_a_service_shows_its_passes(tmp_path: Path, eager: None) -> None:
    body = {"prompt": "Hello", "n_predict": 4}
    preset = Preset(model=ModelSpec(id="demo"), server=ServerSpec(port=0))
    with running_service(preset, tmp_path / "home") as live:
        props = partial(httpx.get, f"{live.url}/props")
        assert props().json()["warm_passes"] == 0
        assert httpx.post(f"{live.url}/completion", json=body, timeout=PATIENCE_S).is_success
        n_passes = wait_until(lambda: props().json()["warm_passes"])
        remarks = msgspec.convert(props().json(), PropsResponse).remarks
        (line,) = (
            line
            for line in httpx.get(f"{live.url}/metrics").text.splitlines()
            if line.startswith("mlxstack_warm_passes_total")
        )
    assert any(remark.startswith("weights kept warm in pauses, by ") for remark in remarks)
    assert float(line.split()[1]) >= n_passes


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on mains whose passes come far more often than in service."""
    monkeypatch.setattr(idle_wait, "has_gpu", lambda: True)
    monkeypatch.setattr(idle_wait, "has_calm_mains", lambda: True)
    monkeypatch.setattr(keep_warm, "INTERVAL_S", 0.001)


@pytest.mark.parametrize("kind", ["tiny", "tiny-hybrid", "tiny-swa"])
def test_answers_are_the_same_with_passes_between_them(
    model_of: ModelOf, tmp_path: Path, eager: None, kind: str
) -> None:
    answers: dict[float, list[list[int]]] = {}
    for keep_warm_s in (0.0, 3600.0):
        device = DeviceSpec(keep_warm_s=keep_warm_s)
        preset = preset_of(model_of(kind), device=device)
        with running(preset, tmp_path / str(keep_warm_s)) as driver:
            answers[keep_warm_s] = []
            for tokens in PROMPTS:
                before = driver.engine.snapshot().counters.n_warm_passes
                first = driver.answer(tokens, 12)
                if keep_warm_s:
                    wait_until(partial(has_passes, driver, before + 3))
                second = driver.answer((*tokens, *first, 5), 12)
                answers[keep_warm_s] += [first, second]
            assert (passes(driver) > 0) == bool(keep_warm_s)
    assert answers[0.0] == answers[3600.0]


def has_passes(driver: Driver, n: int) -> bool:
    return passes(driver) > n


def passes(driver: Driver) -> int:
    """Keep-warm passes that the snapshot shows."""
    return driver.engine.snapshot().counters.n_warm_passes


@pytest.mark.parametrize("kind", ["tiny", "tiny-hybrid", "tiny-swa"])
def test_a_pass_changes_no_kv_no_index_and_no_random_state(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    with running(preset_of(model_of(kind)), tmp_path) as driver:
        driver.answer(PROMPTS[0], 8)
        driver.catch_up()
        loop = driver.engine.loaded.loop

        work = idle_wait.idle_wait(loop, driver.engine.preset, lambda: None, is_alone=True)

        def state() -> tuple[list[bytes], int]:
            arrays = [kv_bytes(slot) for slot in loop.slots]
            return arrays, loop.slot_kv.prefix_cache.index.memory_bytes

        before = state()
        mx.random.seed(7)
        drawn = mx.random.uniform(shape=(4,)).tolist()
        mx.random.seed(7)
        work._compute()
        assert mx.random.uniform(shape=(4,)).tolist() == drawn
        assert state() == before and any(before[0])


def kv_bytes(slot: SlotContext) -> bytes:
    """All arrays of a slot's caches."""
    arrays = [array for _, array in tree_flatten([leaf.state for leaf in slot.leaves])]
    return b"".join(np.array(array).tobytes() for array in arrays if isinstance(array, mx.array))


def test_a_cpu_and_ranks_make_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = replace(driver.engine.preset, device=DeviceSpec())

    def keep_warm_s(*, has_ranks: bool) -> float:
        work = idle_wait.idle_wait(
            driver.engine.loaded.loop, preset, lambda: None, is_alone=not has_ranks
        )
        return work._keep_warm_s

    monkeypatch.setattr(idle_wait, "has_gpu", lambda: False)
    assert keep_warm_s(has_ranks=False) == 0
    monkeypatch.setattr(idle_wait, "has_gpu", lambda: True)
    assert keep_warm_s(has_ranks=True) == 0
    assert keep_warm_s(has_ranks=False) == preset.device.keep_warm_s == 60
