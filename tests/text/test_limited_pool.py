"""Limited processes: a stuck one is ended, slow ones have few places, and clients may leave."""

import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlxstack.core.errors import Busy
from mlxstack.text import limited_pool, limited_process
from mlxstack.text.limited_pool import LimitedPool, PoolLimits, client_of
from mlxstack.text.limited_process import LimitedProcess, Overrun, Stalled
from tests.patience import PATIENCE_S, wait_until

LIMITS = PoolLimits(max_bytes=2**30, quick_s=PATIENCE_S, n_slow=1, n_idle=2, busy="no place")
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> LimitedPool:
    made = LimitedPool("mlxstack.text.rendering.worker", LIMITS)
    request.addfinalizer(made.close)
    return made


def rendering(source: str, **variables: str) -> bytes:
    return pickle.dumps((source, variables))


@pytest.mark.parametrize("n_chars", [1, 5_000_000])
def test_a_stuck_process_is_ended_at_its_deadline(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch, n_chars: int
) -> None:
    """Also while a message of more than a pipe's buffer is sent."""
    assert pool.request(rendering("{{ 1 }}"), PATIENCE_S)[0] == b"+1"
    child = pool._idle[0]._process
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    monkeypatch.setattr(limited_process, "STALL_S", 0.2)
    with pytest.raises(Stalled):
        pool.request(rendering("{{ x|length }}", x="x" * n_chars), PATIENCE_S)
    assert child.poll() is not None
    monkeypatch.setattr(limited_process, "STALL_S", PATIENCE_S)
    assert pool.request(rendering("{{ 2 }}"), PATIENCE_S)[0] == b"+2"


def test_a_job_ends_when_its_client_leaves(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_process, "STALL_S", 100 * PATIENCE_S)
    has_left = threading.Event()

    def work() -> None:
        with client_of(has_left):
            pool.request(rendering(LOOP), 100 * PATIENCE_S)

    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(work)
        wait_until(job.running)
        has_left.set()
        assert isinstance(job.exception(timeout=PATIENCE_S), Busy)
        with pytest.raises(Busy):
            threads.submit(work).result(timeout=PATIENCE_S)


def test_jobs_that_come_together_start_no_more_processes_than_are_kept(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_pool, "START_S", PATIENCE_S)
    started: list[LimitedProcess] = []

    class Started(LimitedProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(limited_pool, "LimitedProcess", Started)
    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(pool.request, rendering("{{ 1 }}"), PATIENCE_S) for _ in range(16)]
    assert {job.result()[0] for job in jobs} == {b"+1"}
    assert len(started) <= LIMITS.n_idle


def test_a_long_job_keeps_others_from_no_process(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_pool, "START_S", 0.0)
    with ThreadPoolExecutor(LIMITS.n_idle) as threads:
        long = [
            threads.submit(pool.request, rendering(LOOP, at=str(at)), 2.0)
            for at in range(LIMITS.n_idle)
        ]
        wait_until(lambda: pool._n_used == LIMITS.n_idle)
        assert pool.request(rendering("{{ 1 }}"), PATIENCE_S)[0] == b"+1"
        assert all(isinstance(job.exception(), Overrun) for job in long)


def test_a_slow_job_without_a_place_is_refused() -> None:
    limits = PoolLimits(max_bytes=2**30, quick_s=0.1, n_slow=1, n_idle=2, busy="no place")
    pool = LimitedPool("mlxstack.text.rendering.worker", limits)
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(pool.request, rendering(LOOP, at=str(at)), 2.0) for at in range(2)]
        errors = sorted(type(job.exception()).__name__ for job in jobs)
    assert errors == [Busy.__name__, Overrun.__name__]
    assert pool.request(rendering("{{ 1 }}"), PATIENCE_S)[0] == b"+1"
    pool.close()
