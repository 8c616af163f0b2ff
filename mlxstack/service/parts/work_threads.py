"""Threads for work on texts of clients."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mlxstack.core.errors import Busy, StackError
from mlxstack.text.limited_pool import client_of

T = TypeVar("T")

CHANGED = "the model was changed while this request was prepared; send it again"


class WorkThreads:
    """`n` threads of one kind of work, which `name` says in words."""

    def __init__(self, n: int, name: str) -> None:
        self.name = name
        self._n = n
        self._pool = ThreadPoolExecutor(n, thread_name_prefix=name)
        self._began_at: dict[object, float] = {}

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a job of no client."""
        return self._pool.submit(self._run, work, threading.Event())

    async def run(self, work: Callable[[], T]) -> T:
        """Run a job of a client, which a cancel ends."""
        has_left = threading.Event()
        try:
            return await asyncio.wrap_future(self._pool.submit(self._run, work, has_left))
        except asyncio.CancelledError:
            has_left.set()
            raise

    def stalled_s(self) -> float:
        """Seconds without a new job, while all threads are busy."""
        began_at = tuple(self._began_at.values())
        if len(began_at) >= self._n:
            return time.monotonic() - max(began_at)
        return 0.0

    def close(self) -> None:
        """Take no more work, and drop what waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[], T], has_left: threading.Event) -> T:
        job = object()
        self._began_at[job] = time.monotonic()
        try:
            with client_of(has_left):
                return work()
        finally:
            del self._began_at[job]


class ThreadGroup:
    """All threads for the texts of one model, which end together."""

    def __init__(self) -> None:
        self._members: list[WorkThreads] = []
        self._reason: StackError | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more work is taken."""
        return self._reason is not None

    def add(self, n: int, name: str) -> WorkThreads:
        """`n` more threads of one kind of work."""
        threads = WorkThreads(n, name)
        self._members.append(threads)
        return threads

    async def run(self, threads: WorkThreads, work: Callable[[], T]) -> T:
        """Run a job of a client in one of `threads`; it ends when the client leaves."""
        if self._reason is not None:
            raise self._reason
        try:
            return await threads.run(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # `close` cancelled the queued work, not the caller.
            raise self._reason or Busy(CHANGED) from None

    def stuck_work(self, limit_s: float) -> str:
        """Work whose threads have all been busy for `limit_s` seconds, or ""."""
        stuck = (threads.name for threads in self._members if threads.stalled_s() > limit_s)
        return next(stuck, "")

    def close(self, reason: StackError) -> None:
        """Refuse new and waiting work, which raises `reason`."""
        self._reason = reason
        for threads in self._members:
            threads.close()
