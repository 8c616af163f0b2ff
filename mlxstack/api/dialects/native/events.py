"""Status feed: the state of the service, a few times per second."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakValueDictionary

from litestar import get
from litestar.response import Stream
from msgspec.structs import replace

from mlxstack.api import streaming
from mlxstack.api.guards import OF_ALL
from mlxstack.api.run_generation import TheService
from mlxstack.core.status import StatusFrame
from mlxstack.service.calls.status_feed import StatusFeed
from mlxstack.service.service import Service, ServiceHealth

TICK_S = 0.5
# An idle service sends one frame in REST_TICKS ticks, and comments in the others.
REST_TICKS = 2
PING = b": ping\n\n"


@get("/events", opt={"is_early": True, **OF_ALL})
async def events(service: TheService) -> Stream:
    """Server-sent events named `frame`, until the service stops; also while it loads."""
    return streaming.streamed(frames(service, TICK_S), {})


class SharedFeed:
    """Frames of a service, which its watchers share for half a tick.

    A frame takes a step of the engine now and then. It names up to 50 requests, so its bytes are
    kept, and not itself.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._feed = StatusFeed(service)
        self._computed_at = -math.inf
        self.event = b""
        self.seen: tuple[Any, ...] = ()
        """Fields of the frame that change with events."""

    def first_event(self) -> bytes:
        """Event of a new watcher, with past samples."""
        past = tuple(self._service.stats.samples)
        return streaming.frame(replace(self._feed.frame(), past=past), "frame")

    def update(self, tick_s: float) -> None:
        """Compute a frame, unless there is one of this half tick."""
        now = time.monotonic()
        if now - self._computed_at >= tick_s / 2:
            frame = self._feed.frame()
            self.event = streaming.frame(frame, "frame")
            self.seen = _seen(frame)
            self._computed_at = now


_FEEDS: WeakValueDictionary[Service, SharedFeed] = WeakValueDictionary()
"""Feeds of services with watchers, which own them."""


async def frames(service: Service, tick_s: float) -> AsyncGenerator[bytes, None]:
    """One frame per tick while something changes, otherwise comments between rare ones."""
    feed = _FEEDS.get(service) or _FEEDS.setdefault(service, SharedFeed(service))
    yield feed.first_event()
    before: tuple[Any, ...] | None = None
    n_still = 0
    while True:
        await asyncio.sleep(tick_s)
        if service.health is ServiceHealth.STOPPING:
            return
        feed.update(tick_s)
        n_still = n_still + 1 if feed.seen == before else 0
        before = feed.seen
        yield PING if n_still % REST_TICKS else feed.event


def _seen(frame: StatusFrame) -> tuple[Any, ...]:
    """Fields that change with events, and not with time alone."""
    snapshot = frame.snapshot
    slots = tuple((slot.state, slot.n_tokens, slot.n_decoded) for slot in snapshot.slots)
    cache = frame.cache
    sizes = (cache.memory_bytes, cache.disk_bytes, cache.n_entries) if cache else ()
    return frame.service.health, snapshot.counters, slots, len(snapshot.waiting), sizes
