"""A feed on file: one JSON object per line, to be recorded and replayed."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from mlxstack.client import Lost
from mlxstack.core.errors import BadRequest
from mlxstack.core.frame import Frame
from mlxstack.tui.feed import Feed, News


class Entry(Struct, frozen=True, omit_defaults=True):
    """A frame, or the reason why there was none; exactly one of them."""

    frame: Frame | None = None
    lost: str | None = None
    retry_s: float = 0.0


class TapeFeed:
    """Replays a tape `speed` times as fast as it was recorded; at 0, without any pause."""

    def __init__(self, name: str, tape: Iterable[News], speed: float = 0.0) -> None:
        self.name = name
        self._tape = tuple(tape)
        self._speed = speed

    async def news(self) -> AsyncGenerator[News, None]:
        """The tape from its beginning to its end."""
        last_at = None
        for one in self._tape:
            if isinstance(one, Frame):
                if last_at is not None and self._speed > 0:
                    await asyncio.sleep(max(0.0, one.at - last_at) / self._speed)
                last_at = one.at
            yield one


class Recording:
    """Passes a feed on, and writes all of it to a file."""

    def __init__(self, feed: Feed, file: BinaryIO) -> None:
        self.name = feed.name
        self._feed = feed
        self._file = file

    async def news(self) -> AsyncGenerator[News, None]:
        """What the feed says; each line is written at once, a person may stop at any time."""
        async with aclosing(self._feed.news()) as feed:
            async for one in feed:
                self._file.write(msgspec.json.encode(_entry(one)) + b"\n")
                yield one


def read_tape(path: Path) -> tuple[News, ...]:
    """Raises BadRequest when the file is not a tape."""
    news = []
    for i, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            news.append(_news(msgspec.json.decode(line, type=Entry)))
        except (msgspec.DecodeError, UnicodeDecodeError) as why:
            raise BadRequest(f"{path} is not a tape: line {i}: {why}") from why
    return tuple(news)


def ended(tape: tuple[News, ...]) -> tuple[News, ...]:
    """The tape, with a last word that says that it is over."""
    return (*tape, Lost("The tape has ended", 0.0))


def new_tape(path: Path) -> BinaryIO:
    """An empty file that only its owner may read: frames hold pieces of prompts."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 0)
    # One that was there before keeps its mode otherwise. A pipe or a device has none of its own.
    if path.is_file():
        os.fchmod(file.fileno(), 0o600)
    return file


def _entry(one: News) -> Entry:
    if isinstance(one, Lost):
        return Entry(lost=one.reason, retry_s=one.retry_s)
    return Entry(frame=one)


def _news(entry: Entry) -> News:
    if entry.frame is not None:
        return entry.frame
    return Lost(entry.lost or "", entry.retry_s)
