"""From admitted requests to their response: whole unless the client leaves, or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from litestar import Request, Response
from litestar.response import Stream

from mlxstack.api.cache_headers import cache_headers
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.sse import BEAT_S, FIRST_S, streamed
from mlxstack.service.generation import AdmittedRequest, stream_response
from mlxstack.service.response_parts import CollectedResponse, ResponsePart, gather
from mlxstack.service.service import Service
from mlxstack.service.stats import saved_s

T = TypeVar("T")

AnyRequest = Request[Any, Any, Any]
Parts = AsyncGenerator[ResponsePart, None]
Frames = Callable[[ResponsePart, Parts], AsyncGenerator[bytes, None]]


async def answer_whole(
    request: AnyRequest,
    service: Service,
    orders: tuple[AdmittedRequest, ...],
    shape: Callable[[tuple[CollectedResponse, ...]], T],
) -> Response[T]:
    """All replies at once; raises Gone when the client left, which cancels the work."""
    replies = await cancel_on_disconnect(request, _all(service, orders))
    first = replies[0]
    headers = cache_headers(orders[0].request, first.started, first.ended.work.saved_s)
    return Response(shape(replies), headers=headers, media_type="application/json")


async def answer_stream(service: Service, order: AdmittedRequest, frames: Frames) -> Stream:
    """Headers go out with the cache numbers if the ask is seated within a second."""
    parts = stream_response(service, order, FIRST_S, BEAT_S)
    first = await anext(parts)
    headers = cache_headers(order.request, first, saved_s(service.engine.snapshot(), first))
    return streamed(frames(first, parts), headers)


def later(service: Service, orders: Iterable[AdmittedRequest]) -> list[Parts]:
    """Replies that begin while another one streams already."""
    return [stream_response(service, order, BEAT_S, BEAT_S) for order in orders]


async def _all(
    service: Service, orders: tuple[AdmittedRequest, ...]
) -> tuple[CollectedResponse, ...]:
    """One failed reply cancels the others and fails the answer."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(service, order)) for order in orders]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return tuple(task.result() for task in tasks)


async def _one(service: Service, order: AdmittedRequest) -> CollectedResponse:
    async with aclosing(stream_response(service, order, BEAT_S, BEAT_S)) as parts:
        return await gather(parts)
