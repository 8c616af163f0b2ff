"""Limited processes that threads share, with few places for slow work.

A job of a client is ended when the client leaves, and refused when it is slow while other slow ones
run, so that jobs of others find threads and processes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from mlxstack.core.errors import Busy
from mlxstack.text.limited_process import LimitedProcess

LEFT = "the client has left"
START_S = 0.1
"""Seconds of waiting for a process that others use; to start one takes about as long."""


class _Client(threading.local):
    has_left: threading.Event | None = None


_CLIENT = _Client()


@contextmanager
def client_of(has_left: threading.Event) -> Iterator[None]:
    """Work of this thread for a client, until it `has_left`."""
    before = _CLIENT.has_left
    _CLIENT.has_left = has_left
    try:
        yield
    finally:
        _CLIENT.has_left = before


def check_client() -> None:
    """Raise Busy when the client of this thread's work has left."""
    if _CLIENT.has_left is not None and _CLIENT.has_left.is_set():
        raise Busy(LEFT)


class PoolLimits(Struct, frozen=True):
    """Limits of the processes of a pool.

    A job is slow after `quick_s` CPU seconds; of `n_slow` places for slow ones each takes one, and
    without it raises Busy with `busy`. `n_idle` processes are kept; more are started where these
    are busy with long jobs. An answer has `max_answered` bytes at most.
    """

    max_bytes: int
    quick_s: float
    n_slow: int
    n_idle: int
    busy: str
    max_answered: int | None = None


class SlowLane:
    """Place of a job among the slow ones."""

    def __init__(self, places: threading.Semaphore, quick_s: float, busy: str) -> None:
        self._places = places
        self._quick_s = quick_s
        self._busy = busy
        self._has_place = False

    def look(self, cpu_s: float) -> None:
        """Take a place for a slow job.

        Raises Busy without one, and when the client has left.
        """
        check_client()
        if self._has_place or cpu_s < self._quick_s:
            return
        self._has_place = self._places.acquire(blocking=False)
        if not self._has_place:
            raise Busy(self._busy)

    def leave(self) -> None:
        """Give the place back."""
        if self._has_place:
            self._places.release()


class LimitedPool:
    """Processes of one module. Thread-safe."""

    def __init__(self, module: str, limits: PoolLimits) -> None:
        self._module = module
        self._limits = limits
        self._freed = threading.Condition()
        self._n_used = 0
        self._idle: list[LimitedProcess] = []
        self._slow = threading.BoundedSemaphore(limits.n_slow)

    def request(self, payload: bytes, limit_s: float) -> tuple[bytes, float]:
        """The answer and its CPU seconds, of `limit_s`.

        Raises Overrun, OSError without a process, and Busy for a slow job without a place, or
        when its client has left.
        """
        check_client()
        process = self._acquire()
        lane = SlowLane(self._slow, self._limits.quick_s, self._limits.busy)
        alive = None
        try:
            answer = process.request(payload, limit_s, lane.look)
            alive = process
        finally:
            lane.leave()
            self._release(alive)
        return answer

    def close(self) -> None:
        """End the idle processes."""
        with self._freed:
            idle = self._idle
            self._idle = []
        for process in idle:
            process.close()

    def _acquire(self) -> LimitedProcess:
        with self._freed:
            if self._n_used >= self._limits.n_idle:
                self._freed.wait_for(lambda: self._n_used < self._limits.n_idle, START_S)
            self._n_used += 1
            if self._idle:
                return self._idle.pop()
        return LimitedProcess(self._module, self._limits.max_bytes, self._limits.max_answered)

    def _release(self, process: LimitedProcess | None) -> None:
        """Give a process back; None: it has ended."""
        with self._freed:
            self._n_used -= 1
            if process is not None and len(self._idle) < self._limits.n_idle:
                self._idle.append(process)
                process = None
            self._freed.notify()
        if process is not None:
            process.close()
