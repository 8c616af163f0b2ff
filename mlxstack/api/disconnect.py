"""Clients that leave before their response is complete: their work is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from litestar import Request
from litestar.exceptions import InternalServerException

T = TypeVar("T")

# Litestar has no class of its own for a body that ends too early.
INCOMPLETE_BODY = "client disconnected prematurely"


class ClientDisconnected(Exception):
    """The client left before its response was complete."""


def is_disconnect(error: Exception) -> bool:
    """Whether the client left, while it sent its request or waited."""
    is_incomplete = isinstance(error, InternalServerException) and error.detail == INCOMPLETE_BODY
    return is_incomplete or isinstance(error, ClientDisconnected)


async def cancel_on_disconnect(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which a disconnect cancels. Raises ClientDisconnected."""
    working = asyncio.create_task(work)
    try:
        await wait_for(request, working)
        return working.result()
    finally:
        await cancel(working)


async def wait_for(request: Request[Any, Any, Any], working: asyncio.Task[Any]) -> None:
    """Wait until a task has ended.

    Raises ClientDisconnected, and the error of a body that only this reads.
    """
    leaving = asyncio.create_task(until_disconnect(request.receive))
    try:
        ended, _ = await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working not in ended:
            leaving.result()
            raise ClientDisconnected
    finally:
        await cancel(leaving)


async def until_disconnect(receive: Callable[[], Awaitable[Any]]) -> Any:
    """Drop messages of a client until it disconnects, and return that message."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; drop its error."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
