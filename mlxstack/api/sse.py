"""Server-sent events as bytes: LF frames, heartbeats that comment, and the response around them."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from litestar.response import Stream

DONE = b"data: [DONE]\n\n"

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

FIRST_S = 1.0
BEAT_S = 10.0


# Many clients, httpx among them, take these for the end of a line.
LINE_ENDS = {end: f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. `data` is anything msgspec can write."""
    head = f"event: {event}\n".encode() if event else b""
    text = msgspec.json.encode(data)
    for end, escaped in LINE_ENDS.items():
        text = text.replace(end.encode(), escaped)
    return head + b"data: " + text + b"\n\n"


def keepalive(n_done: int, n_prompt: int) -> bytes:
    """A comment: keeps connections open, and tells a reader how far the prompt is."""
    return f": keepalive {n_done}/{n_prompt}\n\n".encode()


def streamed(frames: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> Stream:
    """The response that sends these frames as they come."""
    return Stream(
        frames,
        status_code=200,
        media_type="text/event-stream",
        headers={**HEADERS, **headers},
    )
