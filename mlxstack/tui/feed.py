"""Sources of status frames: a running service or a recording."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Protocol

import msgspec
from msgspec.structs import replace

from mlxstack.client.client import Client
from mlxstack.client.types import FeedLost, ListedModels
from mlxstack.core.errors import StackError
from mlxstack.core.status import StatusFrame

PATH = "/events"
# The service says something every second, at the least a comment.
SILENCE_S = 10.0

MODELS_S = 2.0
"""Seconds between two looks at the models of a gateway; frames are of one member."""

KEY = "put the key into MLX_STACK_API_KEY, or give `mlx-stack tui` the option --key"

News = StatusFrame | FeedLost | ListedModels


class Feed(Protocol):
    """Source of frames; `name` is shown in the first line."""

    name: str

    def news(self) -> AsyncGenerator[News, None]:
        """Frames as they come, and a Lost whenever the feed breaks."""


class LiveFeed:
    """The feed of a running service; it never ends, it reconnects."""

    def __init__(self, client: Client) -> None:
        self.name = client.url.partition("://")[2] or client.url
        self._client = client

    async def news(self) -> AsyncGenerator[News, None]:
        """Frames and models as they come; a Lost at each break."""
        async with aclosing(merged(self._frames(), self._models())) as both:
            async for news in both:
                yield news

    async def _frames(self) -> AsyncGenerator[News, None]:
        async with aclosing(self._client.feed(PATH, SILENCE_S)) as feed:
            async for event in feed:
                if isinstance(event, FeedLost):
                    yield _with_remedy(event)
                elif event.event == "frame":
                    yield frame_in(event.data)

    async def _models(self) -> AsyncGenerator[News, None]:
        """Models whenever they can be read: the frames tell of a break."""
        while True:
            with suppress(ConnectionError, StackError):
                yield await self._client.get("/v1/models", ListedModels)
            await asyncio.sleep(MODELS_S)


async def merged(*sources: AsyncGenerator[News, None]) -> AsyncGenerator[News, None]:
    """Yield the items of all sources as they come."""
    nexts = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = nexts.pop(task)
                try:
                    news = task.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(source))] = source
                yield news
    finally:
        for task in nexts:
            task.cancel()
        await asyncio.gather(*nexts, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _with_remedy(lost: FeedLost) -> FeedLost:
    if lost.needs_key:
        return replace(lost, reason=f"{lost.reason}; {KEY}")
    return lost


def frame_in(data: bytes) -> News:
    """Frame in a message, or a Lost with the decoding error."""
    try:
        return msgspec.json.decode(data, type=StatusFrame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return FeedLost(f"unexpected data from the service ({error}); is it another version?", 0.0)
