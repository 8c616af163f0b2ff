"""Seats, queue, cancellation, limits and failures on the real engine (B5 to B7, E4, E11, E18)."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.engine_events import (
    FinishReason,
    KVSource,
    PrefillProgress,
    RequestFinished,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.engine_snapshot import RequestPhase
from mlxstack.core.errors import Broken, Busy
from mlxstack.core.preset import BatchSpec, KVSpec, ModelSpec, PrefillSpec, QueueSpec, SlotSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.patience import PATIENCE_S


@pytest.fixture
def driver(model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        yield driver


def test_b5_a_follow_up_lands_on_its_own_slot(driver: Driver) -> None:
    first = prompt(100, seed=1)
    driver.answer(prompt(80, seed=2), slot=1)
    answer = driver.answer(first, slot=0)
    ask = driver.submit(first + tuple(answer) + prompt(10, seed=3))
    driver.finish(ask)
    assert driver.seated(ask).slot == 0
    assert driver.seated(ask).n_cached == len(first) + len(answer) - 1


def test_x31_a_short_side_request_does_not_destroy_the_long_branch(driver: Driver) -> None:
    head = prompt(130, seed=1)
    long = head + prompt(500, seed=2)
    driver.answer(long, slot=0)
    kept = driver.context(0)
    side = driver.submit(head + prompt(20, seed=3))
    driver.finish(side)
    assert driver.seated(side).slot != 0
    assert driver.seated(side).n_cached == len(head)
    assert driver.seated(side).source is KVSource.FORK
    assert driver.context(0) == kept


def test_b6_a_pinned_slot_is_waited_for(driver: Driver) -> None:
    one = driver.submit(prompt(20, seed=1), 60, slot=0)
    two = driver.submit(prompt(20, seed=2), 5, slot=0)
    driver.finish(two)
    assert driver.events(one, RequestFinished)
    assert driver.seated(two).slot == 0


def test_b7_the_fourth_waits_and_is_served(driver: Driver) -> None:
    asks = [driver.submit(prompt(20, seed=n), 40) for n in range(3)]
    for ask in asks:
        driver.until(ask, TokenSampled)
    fourth = driver.submit(prompt(20, seed=9), 5)
    driver.until_accepted()
    assert not driver.events(fourth, SlotAssigned)
    driver.finish(fourth)
    assert any(driver.events(ask, RequestFinished) for ask in asks)
    for ask in asks:
        driver.finish(ask)


def test_e11_cancelled_while_decoding_frees_the_slot_within_two_steps(driver: Driver) -> None:
    ask = driver.submit(prompt(20), 900)
    driver.until(ask, TokenSampled, 3)
    steps = driver.engine.snapshot().counters.n_decode_calls
    driver.engine.cancel(ask)
    assert driver.finish(ask).reason is FinishReason.CANCELLED
    after = driver.engine.snapshot()
    assert after.counters.n_decode_calls - steps < 60
    again = driver.submit(prompt(20, seed=5), 3)
    driver.finish(again)
    assert driver.engine.snapshot().slots[0].n_tokens >= 20


def test_d22_a_cancelled_prefill_keeps_what_it_computed(model_of: ModelOf, tmp_path: Path) -> None:

    long = prompt(900, seed=1)
    preset = preset_of(model_of("tiny"), prefill=PrefillSpec(chunk_size=128))
    with running(preset, tmp_path) as driver:
        ask = driver.submit(long, 5)
        driver.until(ask, PrefillProgress, 3)
        driver.engine.cancel(ask)
        work = driver.finish(ask).timings
        assert work.n_generated == 0
        again = driver.submit(long, 5)
        driver.finish(again)
        assert driver.seated(again).n_cached >= 3 * 128
        assert driver.tokens(again) == driver.cold(long, 5)


def test_e11_cancelled_while_waiting(driver: Driver) -> None:
    busy = [driver.submit(prompt(20, seed=n), 100) for n in range(3)]
    ask = driver.submit(prompt(20, seed=7), 5)
    driver.until_accepted()
    driver.engine.cancel(ask)
    assert driver.finish(ask).reason is FinishReason.CANCELLED
    assert not driver.events(ask, SlotAssigned)
    for other in busy:
        driver.finish(other)


def test_e4_and_a11_fewer_rows_than_slots(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), batch=BatchSpec(enabled=False))
    with running(preset, tmp_path) as driver:
        asks = [driver.submit(prompt(20, seed=n), 10) for n in range(3)]
        for ask in asks:
            driver.finish(ask)
        counters = driver.engine.snapshot().counters
        assert counters.n_decode_rows == counters.n_decode_calls


def test_e18_a_full_queue_refuses_with_retry_after(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(
        model_of("tiny"), slots=SlotSpec(count=1, n_ctx=1024), queue=QueueSpec(max_waiting=2)
    )
    with running(preset, tmp_path) as driver:
        first = driver.submit(prompt(20), 200)
        driver.until(first, TokenSampled)
        waiting = [driver.submit(prompt(20, seed=n), 2) for n in (1, 2)]
        third = driver.submit(prompt(20, seed=3), 2)
        with pytest.raises(Busy) as refused:
            driver.finish(third)
        assert refused.value.retry_after >= 1
        for ask in (first, *waiting):
            driver.finish(ask)


def test_e12_asks_of_one_agent_run_one_after_another(driver: Driver) -> None:
    one = driver.submit(prompt(20, seed=1), 30, agent="a")
    two = driver.submit(prompt(20, seed=2), 5, agent="a")
    driver.finish(two)
    assert driver.events(one, RequestFinished)


def test_e12_agents_run_beside_each_other(driver: Driver) -> None:
    one = driver.submit(prompt(20, seed=1), 300, agent="a")
    two = driver.submit(prompt(20, seed=2), 5, agent="b")
    driver.finish(two)
    assert not driver.events(one, RequestFinished)
    driver.engine.cancel(one)
    driver.finish(one)


def test_a_request_that_raises_fails_alone(driver: Driver) -> None:
    alone = driver.cold(prompt(20, seed=1), 30)
    good = driver.submit(prompt(20, seed=1), 30, use_cache=False)
    driver.until(good, TokenSampled)
    # A value that no door lets through: mlx-lm raises when it meets it in the step.
    bad = driver.submit(prompt(20, seed=2), 5, sampling=SamplingParams(temperature=1, min_p=7.0))
    with pytest.raises(Broken, match="min_p"):
        driver.finish(bad)
    driver.finish(good)
    assert driver.tokens(good) == alone
    assert driver.answer(prompt(20, seed=2), 5) == driver.cold(prompt(20, seed=2), 5)


def test_a_prompt_that_breaks_its_prefill_fails_alone(driver: Driver) -> None:
    alone = driver.cold(prompt(20, seed=1), 60)
    good = driver.submit(prompt(20, seed=1), 60, use_cache=False)
    driver.until(good, TokenSampled)
    with pytest.raises(Broken):
        driver.finish(driver.submit((1.5,) * 20, 5))  # type: ignore[arg-type]
    driver.finish(good)
    assert driver.tokens(good) == alone


def test_a_broken_turn_fails_its_asks_and_the_engine_goes_on(driver: Driver) -> None:
    alone = driver.cold(prompt(20, seed=1), 5)
    # Not a tuple of ints: no embedding has rows of them.
    with pytest.raises(Broken):
        driver.finish(driver.submit((1.5,) * 20, 5))  # type: ignore[arg-type]
    assert driver.cold(prompt(20, seed=1), 5) == alone


def test_limits_end_an_answer(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=64))
    with running(preset, tmp_path) as driver:
        by_length = driver.submit(prompt(20), 7)
        assert driver.finish(by_length).reason is FinishReason.LENGTH
        assert driver.finish(by_length).timings.n_generated == 7
        by_context = driver.submit(prompt(20), 500)
        assert driver.finish(by_context).reason is FinishReason.CONTEXT
        assert driver.finish(by_context).timings.n_generated == 44
        token = driver.tokens(by_length)[3]
        by_eos = driver.submit(prompt(20), 500, eos=frozenset({token}))
        assert driver.finish(by_eos).reason is FinishReason.EOS
        assert token not in driver.tokens(by_eos)


def test_d1_use_cache_false_reuses_nothing(driver: Driver) -> None:
    driver.answer(prompt(200))
    ask = driver.submit(prompt(200), use_cache=False)
    driver.finish(ask)
    assert driver.seated(ask).n_cached == 0
    assert driver.seated(ask).miss is not None


def test_d23_another_salt_does_not_hit(driver: Driver) -> None:
    driver.answer(prompt(300), salt="one")
    other = driver.submit(prompt(300), salt="two")
    driver.finish(other)
    assert driver.seated(other).n_cached == 0
    same = driver.submit(prompt(300), salt="one")
    driver.finish(same)
    assert driver.seated(same).n_cached == 300


def test_d23_where_an_agent_diverges_is_not_told_under_another_salt(driver: Driver) -> None:
    driver.answer(prompt(300), agent="same", salt="one")
    changed = prompt(150) + prompt(100, seed=7)
    for salt, expected in (("two", ("cold", None)), ("one", ("diverged", 150))):
        ask = driver.submit(changed, agent="same", salt=salt)
        driver.finish(ask)
        miss = driver.seated(ask).miss
        assert miss is not None
        assert (miss.reason, miss.at) == expected


def test_d2_shared_prefixes_are_found_to_the_token(driver: Driver) -> None:
    shared = prompt(300)
    driver.answer(shared + prompt(50, seed=1), slot=0)
    ask = driver.submit(shared + prompt(50, seed=2), slot=1)
    driver.finish(ask)
    assert driver.seated(ask).n_cached == len(shared)
    assert driver.tokens(ask) == driver.cold(shared + prompt(50, seed=2), slot=2)


@pytest.mark.parametrize("kind", ["tiny-swa", "tiny-hybrid"])
def test_d20_checkpoints_at_cuts_serve_layers_that_cannot_be_cut(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    head = prompt(200)
    with running(preset_of(model_of(kind)), tmp_path) as driver:
        driver.answer(head + prompt(150, seed=1), slot=0, checkpoint_positions=(200,))
        ask = driver.submit(head + prompt(150, seed=2), slot=1)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 200
        assert driver.seated(ask).source is KVSource.FORK
        assert driver.tokens(ask) == driver.cold(head + prompt(150, seed=2), slot=2)
        own = driver.submit(head + prompt(150, seed=3), slot=0)
        driver.finish(own)
        assert driver.seated(own).n_cached == 200
        assert driver.tokens(own) == driver.cold(head + prompt(150, seed=3), slot=2)


def test_e10_every_state_of_an_ask_is_seen(driver: Driver) -> None:
    first = driver.submit(prompt(900, seed=1), 40, slot=0)
    second = driver.submit(prompt(20, seed=2), 3, slot=0)
    driver.until(first, PrefillProgress)
    snapshot = driver.engine.snapshot()
    assert snapshot.slots[0].state in {RequestPhase.PREFILLING, RequestPhase.RUNNING}
    assert [one.request for one in snapshot.waiting] == [second]
    driver.until(first, TokenSampled)
    assert driver.engine.snapshot().slots[0].state is RequestPhase.RUNNING
    driver.engine.cancel(first)
    driver.finish(first)
    driver.finish(second)
    assert driver.engine.snapshot().slots[0].state is RequestPhase.COMPLETED
    third = driver.submit(prompt(20, seed=3), 900, slot=1)
    driver.until(third, TokenSampled)
    driver.engine.cancel(third)
    driver.finish(third)
    assert driver.engine.snapshot().slots[1].state is RequestPhase.CANCELLED


def test_e5_nothing_waits_for_company(driver: Driver) -> None:
    """No window is needed: who comes later joins the running batch at the next token."""
    before = driver.engine.snapshot().counters.n_decode_calls
    first = driver.submit(prompt(20, seed=2), 400)
    driver.until(first, TokenSampled)
    second = driver.submit(prompt(20, seed=3), 400)
    driver.finish(first)
    driver.finish(second)
    # One after the other they take 798.
    assert driver.engine.snapshot().counters.n_decode_calls - before < 750


def test_e15_only_the_mlx_thread_runs_the_model_and_moves_kv(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[tuple[str, str]] = set()

    def noted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **more: Any) -> Any:
            names.add((name, threading.current_thread().name))
            return inner(*args, **more)

        monkeypatch.setattr(owner, name, outer)

    for owner, name in ((SlotContext, "extend"), (SlotContext, "load"), (segments, "pack")):
        noted(owner, name)
    running = driver.submit(prompt(20, seed=1), 200, slot=1)
    driver.until(running, TokenSampled)
    driver.answer(prompt(300, seed=2), slot=0)
    driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
    driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(timeout=PATIENCE_S)
    driver.finish(running)
    assert names == {(name, "mlx") for name in ("extend", "load", "pack")}


@pytest.mark.parametrize(("bits", "share"), [(8, 0.53), (4, 0.28)])
def test_e20_quantized_kv_takes_its_share_of_16_bit(
    model_of: ModelOf, bits: int, share: float
) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model

    def n_bytes(spec: KVSpec) -> int:
        caches = CacheFactory(model, spec).make()
        for cache in caches:
            half = mx.random.normal((1, 2, 512, 64)).astype(mx.float16)
            cache.update_and_fetch(half, half)
        return sum(cache.nbytes for cache in caches)

    assert n_bytes(KVSpec(bits=bits)) / n_bytes(KVSpec()) == pytest.approx(share, abs=0.01)


def test_e5_idle_engine_uses_no_cpu(driver: Driver) -> None:
    def used_s() -> float:
        before = time.process_time()
        time.sleep(1.0)
        return time.process_time() - before

    driver.answer(prompt(20), 3)
    time.sleep(0.2)
    # Another test's service in this process may have something to do.
    assert any(used_s() < 0.1 for _ in range(5))
    assert driver.engine.stalled_s() == 0
