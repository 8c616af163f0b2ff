"""Status feed: the state of the service, a few times per second."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from litestar import get
from litestar.response import Stream

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


async def frames(service: Service, tick_s: float) -> AsyncGenerator[bytes, None]:
    """One frame per tick while something changes, otherwise comments between rare ones."""
    status_feed = StatusFeed(service)
    before: tuple[Any, ...] | None = None
    n_still = 0
    while service.health is not ServiceHealth.STOPPING:
        data, before, n_still = _event(status_feed.frame(), before, n_still)
        yield data
        await asyncio.sleep(tick_s)


def _event(
    frame: StatusFrame, before: tuple[Any, ...] | None, n_still: int
) -> tuple[bytes, tuple[Any, ...], int]:
    """Event of a tick, with what is seen and unchanged ticks.

    A variable of the generator would keep the frame, of up to 50 requests, during its sleep.
    """
    seen = _seen(frame)
    n_still = n_still + 1 if seen == before else 0
    data = PING if n_still % REST_TICKS else streaming.frame(frame, "frame")
    return data, seen, n_still


def _seen(frame: StatusFrame) -> tuple[Any, ...]:
    """Fields that change with events, and not with time alone."""
    snapshot = frame.snapshot
    slots = tuple((slot.state, slot.n_tokens, slot.n_decoded) for slot in snapshot.slots)
    cache = frame.cache
    sizes = (cache.memory_bytes, cache.disk_bytes, cache.n_entries) if cache else ()
    return frame.service.health, snapshot.counters, slots, len(snapshot.waiting), sizes
