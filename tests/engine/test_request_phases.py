"""Phases of a request add up to its first token, and name what it waited for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.engine_events import KVSource, RequestTimings, TokenSampled, TTFTPhase
from mlxstack.core.preset import PrefillSpec
from mlxstack.engine.slots.request_state import PhaseTimer
from mlxstack.engine.stats import BULK, EngineStats
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running

steps = st.tuples(st.sampled_from(TTFTPhase), st.integers(0, 2**20))


@pytest.fixture
def driver(model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    preset = preset_of(model_of("tiny"), prefill=PrefillSpec(chunk_size=64))
    with running(preset, tmp_path) as driver:
        yield driver


@contextmanager
def stopped(driver: Driver) -> Iterator[None]:
    """The engine stands still between two steps."""
    may_go_on = threading.Event()
    driver.engine.post(lambda: (may_go_on.wait(), None)[1])
    try:
        yield
    finally:
        may_go_on.set()


def adds_up(work: RequestTimings) -> bool:
    seconds: list[float] = [getattr(work, phase) for phase in TTFTPhase]
    return sum(seconds) == work.ttft_s > 0


@given(st.lists(steps, max_size=40), st.integers(0, 2**20))
def test_phases_add_up_to_the_time_until_the_end(
    changes: list[tuple[TTFTPhase, int]], last: int
) -> None:
    # Ticks of a power of two, so that sums of floats are exact.
    timer = PhaseTimer(0.0)
    now = 0.0
    wanted = dict.fromkeys(TTFTPhase, 0.0)
    phase = TTFTPhase.QUEUED
    for following, ticks in changes:
        now += ticks / 2**10
        wanted[phase] += ticks / 2**10
        timer.enter(following, now)
        phase = following
    wanted[phase] += last / 2**10
    now += last / 2**10
    assert timer.seconds(now) == wanted
    timer.stop(now)
    timer.enter(TTFTPhase.PREFILL, now + 9)
    assert timer.seconds(now + 99) == wanted
    assert sum(wanted.values()) == now


def test_a_clock_that_goes_back_makes_no_negative_phase() -> None:
    timer = PhaseTimer(10.0)
    timer.enter(TTFTPhase.PREFILL, 9.0)
    timer.enter(TTFTPhase.FIRST_TOKEN, 12.0)
    assert timer.seconds(12.0) == {**dict.fromkeys(TTFTPhase, 0.0), TTFTPhase.PREFILL: 2.0}


def test_a_prompt_waits_for_the_chunks_of_another_one(driver: Driver) -> None:
    with stopped(driver):
        asks = [driver.submit(prompt(500, seed=seed), 4) for seed in (1, 2)]
    works = [driver.finish(ask).timings for ask in asks]
    assert all(map(adds_up, works))
    assert max(work.others_s for work in works) > 0
    assert all(work.prefill_s > 0 and work.first_s > 0 for work in works)


def test_a_request_that_waits_for_a_shared_prefix_waits_for_another_prompt(driver: Driver) -> None:
    head = prompt(500, seed=1)
    with stopped(driver):
        first = driver.submit(head, 4)
        second = driver.submit(head + prompt(100, seed=2), 4)
    driver.finish(first)
    work = driver.finish(second).timings
    assert adds_up(work)
    assert driver.seated(second).source is KVSource.FORK
    assert work.others_s > work.prefill_s > 0


def test_decode_steps_of_another_answer_are_a_phase_of_their_own(driver: Driver) -> None:
    writing = driver.submit(prompt(20, seed=1), 400)
    driver.until(writing, TokenSampled)
    work = driver.finish(driver.submit(prompt(500, seed=2), 4)).timings
    assert adds_up(work)
    assert work.beside_s > 0 and work.others_s == 0
    alone = driver.finish(writing).timings
    assert adds_up(alone) and alone.beside_s == 0


def test_a_request_that_waits_for_its_slot_is_queued(driver: Driver) -> None:
    first = driver.submit(prompt(20, seed=1), 60, slot=0)
    work = driver.finish(driver.submit(prompt(20, seed=2), 4, slot=0)).timings
    assert adds_up(work)
    assert work.queued_s > work.prefill_s
    driver.finish(first)


def test_kv_that_is_copied_takes_a_phase(driver: Driver) -> None:
    head = prompt(500, seed=1)
    driver.answer(head, 4)
    work = driver.finish(driver.submit(head + prompt(40, seed=2), 4)).timings
    assert adds_up(work) and work.restore_s > 0


def test_saved_time_is_reckoned_from_one_speed() -> None:
    stats = EngineStats()
    seconds = {1000: 10.0, 2000: 4.0, 4000: 12.0}
    for n_tokens, prefill_s in seconds.items():
        cold = RequestTimings(n_prompt=n_tokens, n_generated=1, prefill_s=prefill_s)
        stats.served(cold, prefill_s)
    assert stats.saved_s(2000) == pytest.approx(6.0)
    # A slow chunk of a moment changes nothing, and neither do prompts that reused KV.
    stats.prefilled([range(512)], 90.0)
    stats.served(RequestTimings(n_prompt=4000, n_cached=3000, n_generated=1, prefill_s=90.0), 90.0)
    stats.served(RequestTimings(n_prompt=BULK - 1, n_generated=1, prefill_s=90.0), 90.0)
    assert stats.saved_s(2000) == pytest.approx(6.0)


@given(st.lists(st.tuples(st.integers(BULK, 10**5), st.floats(0.001, 1e4)), min_size=1))
def test_saved_time_is_never_above_the_slowest_cold_prompt(colds: list[tuple[int, float]]) -> None:
    stats = EngineStats()
    for n_tokens, prefill_s in colds:
        cold = RequestTimings(n_prompt=n_tokens, n_generated=1, prefill_s=prefill_s)
        stats.served(cold, prefill_s)
    slowest = max(seconds / n for n, seconds in colds[-64:])
    assert stats.saved_s(1000) <= 1000 * slowest * (1 + 1e-9)


def test_requests_with_equal_reuse_save_the_same(driver: Driver) -> None:
    for seed in (1, 2):
        driver.answer(prompt(300, seed=seed), 4, agent=f"cold-{seed}")
    saved = []
    for seed in (1, 2):
        # Each has a slot of its own, whose prompt it repeats with another end.
        ask = driver.submit(prompt(300, seed=seed)[:256] + prompt(50, seed=9), 4)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 256
        saved.append(driver.seated(ask).saved_s)
    assert saved[0] == saved[1] > 0
