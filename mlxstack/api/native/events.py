"""The feed of a watcher: what the service looks like, a few times per second."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from litestar import get
from litestar.response import Stream

from mlxstack.api import sse
from mlxstack.api.given import TheService
from mlxstack.core.frame import Frame
from mlxstack.service.frame import frame_of
from mlxstack.service.service import Health, Service

TICK_S = 0.3
# A service that rests is drawn once in so many ticks; the others carry a comment.
REST_TICKS = 4
PING = b": ping\n\n"


@get("/events", opt={"is_early": True})
async def events(service: TheService) -> Stream:
    """Server-sent events named `frame`, until the service stops; also while it loads."""
    return sse.streamed(frames(service, TICK_S), {})


async def frames(service: Service, tick_s: float) -> AsyncGenerator[bytes, None]:
    """A frame per tick while something changes, and a comment between the rare ones else."""
    before, n_still = None, 0
    while service.health is not Health.STOPPING:
        frame = frame_of(service)
        n_still = n_still + 1 if _seen(frame) == before else 0
        yield PING if n_still % REST_TICKS else sse.frame(frame, "frame")
        before = _seen(frame)
        await asyncio.sleep(tick_s)


def _seen(frame: Frame) -> tuple[float, str]:
    """What changes when the engine did something, and not by waiting alone."""
    return frame.snapshot.at, frame.service.health


ROUTES: list[Any] = [events]
