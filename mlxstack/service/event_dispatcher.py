"""Carries the engine's events from the MLX thread to the asyncio queues of their asks."""

import asyncio
import logging
from contextlib import suppress

from mlxstack.core.engine_events import Event, RequestFailed
from mlxstack.core.errors import StackError
from mlxstack.core.request import Request
from mlxstack.service.request_log import RequestLog

log = logging.getLogger(__name__)


class EventDispatcher:
    """One wake-up of the event loop per engine turn, however many asks it served."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self.request_log = RequestLog()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Events go to this loop from now on."""
        self._loop = loop

    def deliver(self, events: tuple[Event, ...]) -> None:
        """Called on the MLX thread. Events of asks nobody waits for are dropped."""
        if self._loop is None:
            return
        # A loop that has closed has no waiters left.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fan_out, events)

    def open(self, request: Request) -> asyncio.Queue[Event]:
        """The queue of one ask."""
        self.request_log.begin(request)
        self._queues[request.id] = asyncio.Queue()
        return self._queues[request.id]

    def close(self, request: str) -> None:
        """Nobody waits for this ask any more."""
        self._queues.pop(request, None)

    def fail_all(self, error: StackError) -> int:
        """Tell every waiter that the engine failed; how many there were."""
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
                queue.put_nowait(event)
