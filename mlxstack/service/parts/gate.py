"""Gate that holds requests back while the model is changed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from mlxstack.core.errors import StackError


class SwapGate:
    """Gate of requests, on the event loop."""

    def __init__(self) -> None:
        self.n_inside = 0
        """Requests that are not over yet."""
        self.n_entered = 0
        """Requests that have passed."""
        self.left_at = time.monotonic()
        """When the last request was over."""
        self.keep_alive_s: float | None = None
        """As the last request that entered set it."""
        self.on_next: Callable[[], None] | None = None
        """Called once, when the next request asks to enter."""
        self.wanted = asyncio.Event()
        """Set while a request waits."""
        self.dismissed = asyncio.Event()
        """Set when `keep_alive_s` is 0."""
        self.loading = asyncio.Lock()
        """Held while a model is loaded in the place of an unloaded one."""
        self._opened = asyncio.Event()
        self._opened.set()
        self._emptied = asyncio.Event()
        self._requests: set[asyncio.Timeout] = set()
        self._reason: StackError | None = None

    @property
    def is_closed(self) -> bool:
        """True while requests have to wait."""
        return not self._opened.is_set()

    async def enter(self) -> None:
        """Wait until it is open, and count the request as inside."""
        if self.on_next is not None:
            self.on_next()
            self.on_next = None
        if self.is_closed:
            self.wanted.set()
        await self._opened.wait()
        self.keep_alive_s = None
        self.n_inside += 1
        self.n_entered += 1

    def keep_alive(self, seconds: float) -> None:
        """Set the time until the idle unload, until the next request enters."""
        self.keep_alive_s = seconds
        if seconds == 0:
            self.dismissed.set()

    def leave(self) -> None:
        """Count a request as over."""
        self.n_inside -= 1
        self.left_at = time.monotonic()
        if not self.n_inside:
            self._emptied.set()

    def close(self) -> None:
        """Let no more requests pass."""
        self._opened.clear()

    def open(self) -> None:
        """Let all waiting requests pass."""
        self.wanted.clear()
        self._opened.set()

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Cancel the body when `interrupt` is called, and raise its reason instead."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests.add(limit)
                yield
        except TimeoutError:
            if self._reason is None or not limit.expired():
                raise
            raise self._reason from None
        finally:
            self._requests.discard(limit)

    def interrupt(self, reason: StackError) -> None:
        """End every request that is inside or waits."""
        self._reason = reason
        now = asyncio.get_running_loop().time()
        for limit in self._requests:
            if not limit.expired():
                limit.reschedule(now)

    async def emptied(self, patience_s: float) -> int:
        """Wait up to `patience_s` until empty; the requests still inside."""
        self._emptied.clear()
        if self.n_inside:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._emptied.wait()
        return self.n_inside
