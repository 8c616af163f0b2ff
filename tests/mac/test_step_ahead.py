"""Steps that are built ahead: those that a GPU gets at once, and those of a CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.engine_events import Event, FinishReason, TokenSampled
from mlxstack.core.errors import Broken
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request, SamplingParams
from mlxstack.engine.decode import batch
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.loop import EngineLoop
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, check_context, preset_of, prompt, running
from tests.patience import wait_until

pytestmark = pytest.mark.mlx


class Guide:
    """Allows everything; its mask raises when it is asked for the `n_masks`-th time."""

    def __init__(self, n_masks: int) -> None:
        self._n_left = n_masks

    def start(self) -> "Guide":
        return Guide(self._n_left)

    def mask(self) -> bytes | None:
        self._n_left -= 1
        if self._n_left == 0:
            raise ValueError("the guide has ended")
        return None

    def advance(self, token: int) -> None:
        """Every token is allowed."""

    is_ruled = False

    def forced_tokens(self) -> tuple[int, ...]:
        return ()

    def close_thought(self) -> bool:
        return False

    def position(self) -> int:
        return self._n_left

    def rewind(self, position: int) -> None:
        self._n_left = position


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", ["tiny", "tiny-swa"])
def test_a_row_that_raises_has_as_many_tokens_as_its_kv(
    model_of: ModelOf, kind: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows with a guide go ahead on a GPU only.
    monkeypatch.setattr(batch, "has_gpu", lambda: is_ahead)
    model = loader.load(ModelSpec(id=str(model_of(kind))), KVSpec()).model
    context = SlotContext(CacheFactory(model, KVSpec()))
    tokens = prompt(9)
    model(mx.array([tokens]), cache=context.caches)
    context.extend(tokens)
    rows = Batch(ModelRunner(model))
    rows.is_ahead = is_ahead
    rows.join(BatchRow(0, context, Sampler(SamplingParams(), tokens, 1, Guide(4)), 10, 50))
    for _ in range(10):
        rows.step()
        check_context(context)
        if rows.take_broken():
            return
    raise AssertionError("the guide never raised")


def test_on_a_cpu_a_row_that_leaves_has_kv_that_another_thread_can_read(model_of: ModelOf) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    batch, context = _running_row(model)
    assert len(batch.step()) == 1
    assert batch.in_flight
    batch.leave(0)
    with ThreadPoolExecutor(1) as pool:
        for cache in context.caches:
            pool.submit(mx.eval, cache.keys, cache.values).result(WAIT_S)
    assert batch.sync() == []
    check_context(context)


def test_no_step_is_built_ahead_of_a_prefill_chunk(model_of: ModelOf) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    batch, _ = _running_row(model)
    batch.step()
    for _ in range(2):
        assert len(batch.step(is_prefilling=True)) == 1
        assert not batch.in_flight


def _running_row(model: Any) -> tuple[Batch, SlotContext]:
    context = SlotContext(CacheFactory(model, KVSpec()))
    tokens = prompt(9)
    model(mx.array([tokens]), cache=context.caches)
    context.extend(tokens)
    batch = Batch(ModelRunner(model))
    batch.join(BatchRow(0, context, Sampler(SamplingParams(), tokens, 0), 10))
    return batch, context


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit every step before the last one is read, as on a GPU."""
    monkeypatch.setattr(batch, "has_gpu", lambda: True)


@pytest.mark.usefixtures("ahead")
def test_an_answer_that_ended_before_its_guide_raised_is_whole_and_kept(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        first = prompt(200)
        free = driver.cold(first, 8)
        n = next(position for position in range(2, 8) if free[position] not in free[:position])
        # The mask after the end is asked for before the end is read.
        ask = driver.submit(
            first, 50, slot=0, agent="a", eos=free[n : n + 1], constraint=Guide(n + 2)
        )
        assert driver.finish(ask).reason is FinishReason.EOS
        assert driver.tokens(ask) == free[:n]
        driver.catch_up()
        check_context(driver.engine.loaded.loop.slots[0])
        follow_up = (*first, *free[: n + 1], *prompt(30, seed=2))
        assert driver.answer(follow_up, 12, slot=0, agent="a") == driver.cold(follow_up, 12)


@pytest.mark.usefixtures("ahead")
def test_a_guide_that_raises_fails_its_row_alone(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        alone = driver.cold(prompt(90, seed=1), 40)
        beside = driver.submit(prompt(90, seed=1), 40, use_cache=False)
        driver.until(beside, TokenSampled)
        bad = driver.submit(prompt(60), 40, slot=2, constraint=Guide(5))
        with pytest.raises(Broken, match="the guide has ended"):
            driver.finish(bad)
        driver.finish(beside)
        assert driver.tokens(beside) == alone
        assert driver.context(2) == ()


@pytest.mark.usefixtures("ahead")
def test_no_step_stays_in_flight_when_the_last_row_has_left(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        free = driver.cold(prompt(50), 8)
        # An end that only the token itself tells: the next step is scheduled by then.
        ask = driver.submit(prompt(50), 900, eos=free[-1:])
        assert driver.finish(ask).reason is FinishReason.EOS
        wait_until(lambda: not driver.engine.loaded.loop.batch.in_flight)


def test_an_error_of_a_step_in_flight_leaves_no_request_without_an_end(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of a row that leaves is submitted; only that may fail, once."""

    def failing(batch: Batch, slot: int) -> None:
        if batch._unsubmitted:
            monkeypatch.undo()
            submit = mx.async_eval

            def once(*_: Any) -> None:
                mx.async_eval = submit
                raise RuntimeError("[malloc] Unable to allocate 123 bytes.")

            mx.async_eval = once
        leave(batch, slot)

    leave = Batch.leave
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        free = driver.cold(prompt(50), 30)
        eos = next(free[n : n + 1] for n in range(10, 30) if free[n] not in free[:n])
        alone = driver.cold(prompt(60), 60)
        monkeypatch.setattr(Batch, "leave", failing)
        longer = driver.submit(prompt(60), 60, use_cache=False)
        shorter = driver.submit(prompt(50), 60, use_cache=False, eos=frozenset(eos))
        assert driver.finish(shorter).reason is FinishReason.EOS
        driver.finish(longer)
        assert driver.tokens(longer) == alone
        driver.catch_up()
        assert driver.answer(prompt(50), 30, slot=0) == free


def test_tokens_and_ends_do_not_wait_for_the_kv_of_a_slot(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Detaching it waits for the step in flight, which may contain all rows."""
    log: list[str] = []
    detach = SlotContext.detach

    def logged(context: SlotContext) -> None:
        log.append("detach")
        detach(context)

    def scene(loop: EngineLoop) -> None:
        def deliver(events: tuple[Event, ...]) -> None:
            log.extend(f"{type(event).__name__} {event.request}" for event in events)

        loop.submit(Request("longer", PromptTokens(prompt(60)), 60, use_cache=False))
        loop.submit(
            Request("shorter", PromptTokens(prompt(50)), 60, use_cache=False, eos=frozenset(eos))
        )
        while "RequestFinished shorter" not in log:
            log.append("step")
            loop.step(deliver)

    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        free = driver.cold(prompt(50), 30)
        eos = next(free[n : n + 1] for n in range(10, 30) if free[n] not in free[:n])
        monkeypatch.setattr(SlotContext, "detach", logged)
        driver.engine.run(scene).result(WAIT_S)
        monkeypatch.undo()
    end = log[-1 - log[::-1].index("step") :]
    assert end == ["step", "TokenSampled longer", "RequestFinished shorter", "detach"]
