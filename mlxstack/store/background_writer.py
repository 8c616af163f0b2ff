"""Background writer: one thread for all disk writes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

from mlxstack.core.errors import Busy, Conflict, StackError
from mlxstack.store.files import refused

T = TypeVar("T")


class BackgroundWriter:
    """Runs jobs in the order of submission. Callable from any thread.

    `submit` never blocks: beyond the bound it raises Busy, and the caller keeps its bytes and
    decides. One job that is bigger than the bound by itself is taken when nothing else waits.
    `eased` is called after every job, on any thread: there is more room now.
    """

    def __init__(
        self,
        max_jobs: int = 256,
        max_bytes: int = 1 << 30,
        eased: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._eased = eased
        self._state = Condition()
        self._n_jobs = 0
        self._n_bytes = 0
        self._is_open = True
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")

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
            return self._state.wait_for(lambda: not self._n_jobs, timeout_s)

    def close(self) -> None:
        """Take no more jobs, finish those that wait, end the thread."""
        with self._state:
            self._is_open = False
        self._thread.shutdown(wait=True)

    def _admit(self, n_bytes: int) -> None:
        if not self._is_open:
            raise Conflict("the service is stopping, nothing more is written to disk")
        n_after = self._n_bytes + n_bytes
        if self._n_jobs and (self._n_jobs >= self._max_jobs or n_after > self._max_bytes):
            raise Busy(
                f"the disk is behind: {self._n_jobs} writes of {self._n_bytes} bytes wait, "
                f"the bound is {self._max_jobs} writes of {self._max_bytes} bytes"
            )
        self._n_jobs = self._n_jobs + 1
        self._n_bytes = n_after

    def _run(self, job: Callable[[], T], n_bytes: int) -> T:
        try:
            return job()
        except StackError:
            raise
        except Exception as error:
            raise _in_words(error) from error
        finally:
            self._settle(n_bytes)

    def _forget(self, future: Future[T], n_bytes: int) -> None:
        if future.cancelled():
            self._settle(n_bytes)

    def _settle(self, n_bytes: int) -> None:
        with self._state:
            self._n_jobs -= 1
            self._n_bytes -= n_bytes
            self._state.notify_all()
        self._eased()


def _in_words(error: Exception) -> StackError:
    if isinstance(error, OSError):
        return refused("a background write failed", error)
    return StackError(f"a background write failed: {type(error).__name__}: {error}")
