"""Streaming driver: frames, heartbeats, and the one loop of all dialects."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from litestar.response import Stream

from mlxstack.api.errors import to_stack_error
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import CollectedResponse, ResponsePart

Parts = AsyncGenerator[ResponsePart, None]
NumberedParts = AsyncGenerator[tuple[int, ResponsePart], None]

EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive 0/0\n"
"""Comment without a blank line, which some decoders (openai-go) take for an event without data."""

BLANK = b" "
"""Heartbeat of a whole answer in JSON, which white space may precede (RFC 8259, 2)."""

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

FIRST_S = 1.0
BEAT_S = 10.0
EARLY_S = 8.0
"""Seconds until a whole answer that is not there begins with white space."""
LOOKUP_S = 10.0
"""Seconds until the head of an answer is sent without the lookup of its KV, whose figures it lacks.

Proxies close connections that are silent for 30 seconds.
"""

# Many clients, httpx among them, split lines at these characters.
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}


class Renderer(Protocol):
    """Renders the parts of replies as frames of a dialect."""

    media_type: str = EVENT_STREAM

    def whole(self, replies: tuple[CollectedResponse, ...]) -> Any:
        """Response to a request that does not stream."""

    def opening(self) -> Iterable[bytes]:
        """Frames before the first part."""
        return ()

    def render(self, index: int, part: ResponsePart) -> Iterable[bytes]:
        """Frames of a part of the reply number `index`."""

    def closing(self) -> Iterable[bytes]:
        """Frames after the last part of the last reply."""
        return ()

    def failure(self, error: StackError) -> bytes:
        """Last frame of a stream that broke."""


def frame(data: Any, event: str | None = None) -> bytes:
    """One server-sent event. `data` is anything msgspec can write."""
    return framed(_one_line(data), event)


def framed(data: bytes, event: str | None = None) -> bytes:
    """One server-sent event of data that is one line."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + data + b"\n\n"


def json_line(data: Any) -> bytes:
    """One line of a stream of JSON lines."""
    return _one_line(data) + b"\n"


def _one_line(data: Any) -> bytes:
    text = msgspec.json.encode(data)
    for end, escaped in LINE_ENDS.items():
        text = text.replace(end, escaped)
    return text


def keepalive(n_done: int, n_prompt: int) -> bytes:
    """SSE comment that keeps a connection open, with prompt progress."""
    return f": keepalive {n_done}/{n_prompt}\n".encode()


async def frames(
    first: ResponsePart, parts: NumberedParts, renderer: Renderer
) -> AsyncGenerator[bytes, None]:
    """Stream from the opening to the closing frame, or an error.

    `first` is the first part of the first reply, `parts` are all others.
    """
    async with aclosing(parts):
        try:
            for data in renderer.opening():
                yield data
            for data in renderer.render(0, first):
                yield data
            async for index, part in parts:
                for data in renderer.render(index, part):
                    yield data
            for data in renderer.closing():
                yield data
        except Exception as problem:
            yield renderer.failure(to_stack_error(problem))


def streamed(
    frames: AsyncGenerator[bytes, None], headers: Mapping[str, str], media_type: str = EVENT_STREAM
) -> Stream:
    """Response that sends these frames as they come."""
    return Stream(frames, status_code=200, media_type=media_type, headers={**HEADERS, **headers})


async def interleaved(replies: Sequence[Parts]) -> NumberedParts:
    """Merge the parts of all replies, each with its reply's index.

    The first failure ends them all, and so does leaving the iterator.
    """
    if len(replies) == 1:
        async with aclosing(replies[0]) as lone:
            async for only in lone:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, ResponsePart | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(queue, i, parts)) for i, parts in enumerate(replies)]
    n_open = len(tasks)
    try:
        while n_open:
            index, part = await queue.get()
            if isinstance(part, Exception):
                raise part
            if part is None:
                n_open -= 1
            else:
                yield index, part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    queue: asyncio.Queue[tuple[int, ResponsePart | Exception | None]], index: int, parts: Parts
) -> None:
    """None ends a reply that went well."""
    try:
        async with aclosing(parts):
            async for part in parts:
                queue.put_nowait((index, part))
        queue.put_nowait((index, None))
    except Exception as problem:
        queue.put_nowait((index, problem))
