"""The background writer: one thread that waits for the disk so that nobody else has to."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import Busy, Conflict, StackError
from mlxstack.core.ports import Blob, Vault
from mlxstack.store.disk import refused

T = TypeVar("T")


class Bound(Struct, frozen=True):
    """How much may wait to be written."""

    n_jobs: int = 256
    n_bytes: int = 1 << 30


class Backlog(Struct, frozen=True):
    """What waits or is being written now, and what went wrong so far."""

    n_jobs: int = 0
    n_bytes: int = 0
    n_done: int = 0
    n_failed: int = 0
    last_error: str = ""


class Writer:
    """Runs jobs one after another, in the order of submission. Callable from any thread.

    `submit` never blocks: beyond the bound it raises Busy, and the caller keeps its bytes and
    decides. One job that is bigger than the bound by itself is taken when nothing else waits.
    """

    def __init__(self, bound: Bound | None = None) -> None:
        self._bound = bound or Bound()
        self._state = Condition()
        self._backlog = Backlog()
        self._is_open = True
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")

    @property
    def backlog(self) -> Backlog:
        """An immutable value; its `n_bytes` count against the memory budget."""
        return self._backlog

    def write(self, vault: Vault, blob: Blob) -> Future[int]:
        """Submit `vault.write(blob)`; the result is the bytes newly written."""
        n_bytes = sum(memoryview(plane.data).nbytes for plane in blob.planes)
        return self.submit(lambda: vault.write(blob), n_bytes)

    def submit(self, job: Callable[[], T], n_bytes: int = 0) -> Future[T]:
        """Run `job`, which keeps `n_bytes` alive. Raises Busy, or Conflict after `close`.

        The future fails with a StackError in plain words, whatever the job raised.
        """
        with self._state:
            self._admit(n_bytes)
            future = self._thread.submit(self._run, job, n_bytes)
        future.add_done_callback(lambda done: self._forget(done, n_bytes))
        return future

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is pending; whether that came true in time."""
        with self._state:
            return self._state.wait_for(lambda: not self._backlog.n_jobs, timeout_s)

    def close(self) -> None:
        """Take no more jobs, finish those that wait, end the thread."""
        with self._state:
            self._is_open = False
        self._thread.shutdown(wait=True)

    def _admit(self, n_bytes: int) -> None:
        now = self._backlog
        if not self._is_open:
            raise Conflict("the service is stopping, nothing more is written to disk")
        is_full = now.n_jobs >= self._bound.n_jobs or now.n_bytes + n_bytes > self._bound.n_bytes
        if now.n_jobs and is_full:
            raise Busy(
                f"the disk is behind: {now.n_jobs} writes of {now.n_bytes} bytes wait, "
                f"the bound is {self._bound.n_jobs} writes of {self._bound.n_bytes} bytes"
            )
        self._backlog = replace(now, n_jobs=now.n_jobs + 1, n_bytes=now.n_bytes + n_bytes)

    def _run(self, job: Callable[[], T], n_bytes: int) -> T:
        try:
            result = job()
        except Exception as error:
            plain = _in_words(error)
            self._settle(n_bytes, n_failed=self._backlog.n_failed + 1, last_error=plain.message)
            raise plain from error
        self._settle(n_bytes, n_done=self._backlog.n_done + 1)
        return result

    def _forget(self, future: Future[T], n_bytes: int) -> None:
        if future.cancelled():
            self._settle(n_bytes)

    def _settle(self, n_bytes: int, **outcome: int | str) -> None:
        with self._state:
            now = self._backlog
            self._backlog = replace(
                now, n_jobs=now.n_jobs - 1, n_bytes=now.n_bytes - n_bytes, **outcome
            )
            self._state.notify_all()


def _in_words(error: Exception) -> StackError:
    if isinstance(error, StackError):
        return error
    if isinstance(error, OSError):
        return refused("a background write failed", error)
    return StackError(f"a background write failed: {type(error).__name__}: {error}")
