"""Runs generation requests: to a whole response, or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any, TypeVar

from litestar import Request, Response
from litestar.di import NamedDependency, Provide
from litestar.handlers import BaseRouteHandler
from litestar.response import Stream
from litestar.types import Guard
from msgspec.json import encode as encode_json

from mlxstack.api.caller import reader_of
from mlxstack.api.disconnect import cancel, wait_for
from mlxstack.api.errors import to_stack_error
from mlxstack.api.guards import Connection, request_id
from mlxstack.api.protocols import dialect_of
from mlxstack.api.response_headers import answer_headers
from mlxstack.api.streaming import (
    BEAT_S,
    BLANK,
    EARLY_S,
    LOOKUP_S,
    NumberedParts,
    Parts,
    Renderer,
    frames,
    interleaved,
    streamed,
)
from mlxstack.core.errors import BadRequest
from mlxstack.core.response_parts import CollectedResponse, gather
from mlxstack.service.calls.generation import Generation, stream_response
from mlxstack.service.service import Service

T = TypeVar("T")

# Parameters of handlers.
AnyRequest = Request[Any, Any, Any]
TheService = NamedDependency[Service]

Group = Sequence[Generation]
Groups = Sequence[Group]
"""Requests that run in parallel; groups of them that run in turn."""


def provided(service: Service) -> Provide:
    """Dependency that gives handlers the service."""
    return Provide(lambda: service, sync_to_thread=False)


def loaded_guard(service: Service) -> Guard:
    """Refuse requests until the model is loaded, but for routes that answer before."""

    async def guard(_: Connection, handler: BaseRouteHandler) -> None:
        if handler.opt.get("is_of_facts"):
            service.require_facts()
        elif not handler.opt.get("is_early"):
            service.require()

    return guard


def reader_guard(service: Service) -> Guard:
    """Show the service's features which program reads from it; refuses none."""

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        if connection.scope.get("method") in ("GET", "HEAD"):
            for feature in service.features:
                feature.on_connection(reader_of(connection))

    return guard


async def answer(
    request: AnyRequest, service: Service, groups: Groups, renderer: Renderer, is_stream: bool
) -> Response[Any] | Stream:
    """Answer of a renderer, as a stream or whole."""
    if is_stream:
        return await _answer_stream(service, groups, renderer)
    return await _answer_whole(request, service, tuple(chain(*groups)), renderer)


async def _answer_whole(
    request: AnyRequest, service: Service, orders: Group, renderer: Renderer
) -> Response[Any] | Stream:
    """All replies at once, or behind white space.

    Some clients wait no longer than minutes for the head of a response. Raises ClientDisconnected,
    which cancels the work.
    """
    working = asyncio.create_task(_all(service, orders))
    heading = asyncio.create_task(_until_head(working, orders[0]))
    try:
        await wait_for(request, heading)
    except BaseException:
        await cancel(working)
        raise
    finally:
        await cancel(heading)
    if not working.done():
        headers = answer_headers(orders[0], orders[0].assigned)
        return streamed(_behind_blanks(request, working, renderer), headers, "application/json")
    replies = working.result()
    first = replies[0]
    headers = answer_headers(orders[0], first.started, first.ended.work)
    return Response(renderer.whole(replies), headers=headers, media_type="application/json")


async def _until_head(working: asyncio.Task[Any], generation: Generation) -> None:
    """Wait until the head of a whole answer is due.

    Its headers have the figures of the cache as soon as the lookup is done, which takes
    milliseconds once the request has a slot.
    """
    ended, _ = await asyncio.wait({working}, timeout=EARLY_S)
    if not ended:
        lookup = asyncio.create_task(generation.lookup.wait())
        await asyncio.wait(
            {working, lookup},
            timeout=max(0.0, LOOKUP_S - EARLY_S),
            return_when=asyncio.FIRST_COMPLETED,
        )
        await cancel(lookup)


async def _behind_blanks(
    request: AnyRequest, working: asyncio.Task[tuple[CollectedResponse, ...]], renderer: Renderer
) -> AsyncGenerator[bytes, None]:
    """White space until the response, then its JSON or error."""
    try:
        yield BLANK
        while not (await asyncio.wait({working}, timeout=BEAT_S))[0]:
            yield BLANK
        yield encode_json(renderer.whole(working.result()))
    except Exception as problem:
        body = dialect_of(request.scope["path"]).error_body
        yield encode_json(body(to_stack_error(problem), request_id(request.scope)))
    finally:
        await cancel(working)


async def _answer_stream(service: Service, groups: Groups, renderer: Renderer) -> Stream:
    """Stream groups of replies in turn, each group in parallel.

    Headers carry the cache numbers if the first request gets its slot within `LOOKUP_S`.
    """
    generation = groups[0][0]
    parts = stream_response(service, generation, LOOKUP_S, BEAT_S)
    first = await anext(parts)
    chunks = frames(first, _numbered(service, parts, groups), renderer)
    return streamed(chunks, answer_headers(generation, first), renderer.media_type)


async def _numbered(service: Service, begun: Parts, groups: Groups) -> NumberedParts:
    """Parts with the index of their reply; `begun` is the first reply."""
    n_before = 0
    for group in groups:
        replies = []
        if n_before == 0:
            replies.append(begun)
        generations = group[len(replies) :]
        replies += [
            stream_response(service, generation, BEAT_S, BEAT_S) for generation in generations
        ]
        async with aclosing(interleaved(replies)) as parts:
            async for index, part in parts:
                yield n_before + index, part
        n_before += len(group)


async def _all(service: Service, orders: Group) -> tuple[CollectedResponse, ...]:
    """One failed reply cancels the others and fails the response."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(service, generation)) for generation in orders]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return tuple(task.result() for task in tasks)


async def _one(service: Service, generation: Generation) -> CollectedResponse:
    async with aclosing(stream_response(service, generation, BEAT_S, BEAT_S)) as parts:
        return await gather(parts)


def n_choices(n: int | None, n_slots: int) -> int:
    """Number of choices, one for each slot at most. Raises BadRequest."""
    if n is None:
        return 1
    if not 1 <= n <= n_slots:
        raise BadRequest(
            f"n is {n}; it must be 1 to {n_slots}, the number of slots of this service", "n"
        )
    return n


def check_all(n_prompts: int, n: int, service: Service) -> None:
    """Raises BadRequest for more choices than one request may have.

    They have to fit in the queue; as many as there are slots are always accepted.
    """
    most = max(service.preset.queue.max_waiting, service.preset.slots.count)
    if n_prompts * n > most:
        raise BadRequest(
            f"{n_prompts} prompts with {n} choices each are {n_prompts * n} answers; "
            f"one request may ask for {most} (queue.max_waiting of the preset)",
            "prompt",
        )


def copies(generation: Generation, n: int) -> tuple[Generation, ...]:
    """The generation, and copies with other seeds, which have no agent."""
    return (generation, *(generation.copy(i) for i in range(1, n)))
