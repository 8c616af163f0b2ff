"""Event streams of requests, from the MLX thread to the event loop."""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from mlxstack.core.engine_events import Event, RequestFailed, RequestFinished
from mlxstack.core.errors import StackError
from mlxstack.core.request import Request
from mlxstack.service.parts.request_log import Decode, RequestLog

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine


class EventQueue:
    """Events of one request, for one reader.

    The timer of a wait is kept for the next one: a timeout for each token would cost as much as
    rendering it.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Add an event, on the reader's loop."""
        self._events.append(event)
        self._wake()

    async def get(self, patience_s: float) -> Event | None:
        """Next event, or None after `patience_s` without one."""
        if not self._events:
            loop = asyncio.get_running_loop()
            self._set_timer(loop, loop.time() + patience_s)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Stop the timer, after the last wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._due = due
        if self._timer is not None and self._timer.when() > due:
            self.close()
        if self._timer is None:
            self._timer = loop.call_at(due, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """End a wait that is over; the timer serves a later one."""
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() < self._due:
            self._set_timer(loop, self._due)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStream:
    """Events of one request, in order."""

    def __init__(self, request: Request, queue: EventQueue, engine: "ChatEngine") -> None:
        self.request = request
        self.is_over = False
        self._is_cancelled = False
        self._queue = queue
        self._engine = engine

    def cancel(self) -> None:
        """Cancel the request; its last event still comes."""
        if not self.is_over and not self._is_cancelled:
            self._is_cancelled = True
            self._engine.cancel(self.request.id)

    async def next(self, patience_s: float) -> Event | None:
        """Next event, or None after `patience_s` of silence. Raises the request's error."""
        event = await self._queue.get(patience_s)
        if isinstance(event, RequestFailed):
            self.is_over = True
            raise event.error
        self.is_over = isinstance(event, RequestFinished)
        return event


log = logging.getLogger(__name__)


class EventDispatcher:
    """Dispatches events to requests, with one loop wake-up per step."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, EventQueue] = {}
        self.request_log = RequestLog()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the loop that receives the events."""
        self._loop = loop

    def deliver(self, events: tuple[Event, ...]) -> None:
        """Called on the MLX thread; events of closed requests are dropped."""
        if self._loop is None:
            return
        # A loop that has closed has no waiters left.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fan_out, events)

    def open(self, request: Request, decode: Decode) -> EventQueue:
        """Queue of one request."""
        self.request_log.begin(request, decode)
        self._queues[request.id] = EventQueue()
        return self._queues[request.id]

    def close(self, request: str) -> None:
        """Drop the queue of a request."""
        queue = self._queues.pop(request, None)
        if queue is not None:
            queue.close()

    def fail_all(self, error: StackError) -> int:
        """Fail every open request; returns their number."""
        self._fan_out(tuple(RequestFailed(request, error) for request in self._queues))
        return len(self._queues)

    def _fan_out(self, events: tuple[Event, ...]) -> None:
        for event in events:
            try:
                self.request_log.note(event)
            except Exception:  # an account that was not kept must not cost an answer
                log.exception("an event of %s was not noted", event.request)
            queue = self._queues.get(event.request)
            if queue is not None:
                queue.put(event)
