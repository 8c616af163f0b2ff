"""Sources of status frames: a running service or a recording."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec.structs import replace

from mlxstack.client import Client, FeedLost
from mlxstack.core.status import StatusFrame

PATH = "/events"
# The service says something every second, at the least a comment.
SILENCE_S = 10.0

KEY = "put the key into MLX_STACK_API_KEY, or give `mlx-stack tui` the option --key"

News = StatusFrame | FeedLost


class Feed(Protocol):
    """Source of frames; `name` is shown in the first line."""

    name: str

    def news(self) -> AsyncGenerator[News, None]:
        """Frames as they come, and a Lost whenever the feed breaks."""
        ...


class LiveFeed:
    """The feed of a running service; it never ends, it reconnects."""

    def __init__(self, client: Client) -> None:
        self.name = client.url.partition("://")[2] or client.url
        self._client = client

    async def news(self) -> AsyncGenerator[News, None]:
        """Frames as they come, and a Lost whenever the feed breaks."""
        async with aclosing(self._client.feed(PATH, SILENCE_S)) as feed:
            async for one in feed:
                if isinstance(one, FeedLost):
                    yield replace(one, reason=f"{one.reason}; {KEY}") if one.needs_key else one
                elif one.event == "frame":
                    yield frame_in(one.data)


def frame_in(data: bytes) -> News:
    """Frame in a message, or a Lost with the decoding error."""
    try:
        return msgspec.json.decode(data, type=StatusFrame)
    except (msgspec.DecodeError, UnicodeDecodeError) as why:
        return FeedLost(f"unexpected data from the service ({why}); is it another version?", 0.0)
