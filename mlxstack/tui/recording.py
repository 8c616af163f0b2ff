"""Recording of a feed: one JSON object per line, for replay."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from mlxstack.client.types import FeedLost, ListedModels
from mlxstack.core.errors import BadRequest
from mlxstack.core.status import StatusFrame
from mlxstack.tui.feed import Feed, News


class RecordedFrame(Struct, frozen=True, omit_defaults=True):
    """Frame, models, or the reason for a break; exactly one of them."""

    frame: StatusFrame | None = None
    models: ListedModels | None = None
    lost: str | None = None
    retry_s: float = 0.0


class RecordingFeed:
    """Replay a recording at `speed`; 0 plays without pauses."""

    def __init__(self, name: str, recording: Iterable[News], speed: float = 0.0) -> None:
        self.name = name
        self._recording = tuple(recording)
        self._speed = speed

    async def news(self) -> AsyncGenerator[News, None]:
        """Yield the recording from its beginning to its end."""
        last_at = None
        for news in self._recording:
            if isinstance(news, StatusFrame):
                if last_at is not None and self._speed > 0:
                    await asyncio.sleep(max(0.0, news.at - last_at) / self._speed)
                last_at = news.at
            yield news


class RecordingWriter:
    """Passes a feed on, and writes all of it to a file."""

    def __init__(self, feed: Feed, file: BinaryIO) -> None:
        self.name = feed.name
        self._feed = feed
        self._file = file

    async def news(self) -> AsyncGenerator[News, None]:
        """Yield the feed, and write each line at once."""
        async with aclosing(self._feed.news()) as feed:
            async for news in feed:
                self._file.write(msgspec.json.encode(_entry(news)) + b"\n")
                yield news


def read_recording(path: Path) -> tuple[News, ...]:
    """Raises BadRequest when the file is not a recording."""
    news = []
    for i, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            news.append(_news(msgspec.json.decode(line, type=RecordedFrame)))
        except (msgspec.DecodeError, UnicodeDecodeError) as why:
            raise BadRequest(f"{path} is not a recording: line {i}: {why}") from why
    return tuple(news)


def ended(recording: tuple[News, ...]) -> tuple[News, ...]:
    """Append the end of the feed to a recording."""
    return (*recording, FeedLost("The recording has ended", 0.0))


def new_recording(path: Path) -> BinaryIO:
    """Create a private file: frames hold pieces of prompts."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 0)
    # One that was there before keeps its mode otherwise. A pipe or a device has none of its own.
    if path.is_file():
        os.fchmod(file.fileno(), 0o600)
    return file


def _entry(news: News) -> RecordedFrame:
    if isinstance(news, FeedLost):
        return RecordedFrame(lost=news.reason, retry_s=news.retry_s)
    if isinstance(news, ListedModels):
        return RecordedFrame(models=news)
    return RecordedFrame(frame=news)


def _news(entry: RecordedFrame) -> News:
    if entry.frame is not None:
        return entry.frame
    if entry.models is not None:
        return entry.models
    return FeedLost(entry.lost or "", entry.retry_s)
