"""Server-sent events, parsed."""

from collections.abc import AsyncGenerator

import httpx
from msgspec import Struct


class ServerSentEvent(Struct, frozen=True):
    """One server-sent event of a feed."""

    event: str
    data: bytes


class FeedLost(Struct, frozen=True):
    """The feed broke off; it is tried again in `retry_s` seconds."""

    reason: str
    retry_s: float


async def events(answer: httpx.Response) -> AsyncGenerator[ServerSentEvent, None]:
    """The events of a stream; comments (heartbeats) are dropped. After the WHATWG rules."""
    name, data = b"message", list[bytes]()
    async for line in _lines(answer):
        if not line:
            if data:
                yield ServerSentEvent(name.decode(), b"\n".join(data))
            name, data = b"message", []
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Lines ended by LF or CRLF. (`aiter_lines` also cuts at U+2028, which JSON may hold.)"""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
