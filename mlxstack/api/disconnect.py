"""Stops the work on an answer when its client has left."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from litestar import Request
from litestar.exceptions import InternalServerException

T = TypeVar("T")

# What Litestar raises when a body ends before its time has no class of its own.
HALF = "client disconnected prematurely"


class ClientDisconnected(Exception):
    """The client left; there is nobody to answer."""


def has_left(problem: Exception) -> bool:
    """Whether this says that the client left, on its way in or while it waited."""
    is_half = isinstance(problem, InternalServerException) and problem.detail == HALF
    return is_half or isinstance(problem, ClientDisconnected)


async def cancel_on_disconnect(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises Gone."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        await _cancel(leaving)
        await _cancel(working)


async def _left(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
