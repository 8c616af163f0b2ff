"""Slow clients and a flood through a gateway: `python -m tests.endurance.loris`.

Heads and bodies that grow by a byte at a time, streams that are read slowly or not at all, and
clients that vanish, beside a flood of short requests. Every greedy answer is the one from before,
every slow reader gets all of its stream, and afterwards nothing is under way.
"""

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from msgspec import Struct

from mlxstack.core.preset import ServerSpec
from tests import models
from tests.api.requests import chat_body
from tests.api.running import Running, tiny_preset
from tests.gateway.gateway_thread import running_behind
from tests.patience import PATIENCE_S, wait_until

CHAT = "/v1/chat/completions"
DRIP_S = 0.05
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class Slowness(Struct, frozen=True):
    """Clients of each kind, all at once."""

    n_heads: int = 300
    n_bodies: int = 300
    n_readers: int = 20
    n_silent: int = 20
    n_vanishing: int = 40
    n_flood: int = 600


class LorisOutcome(Struct, frozen=True):
    """Answers compared, streams read slowly to their end, refusals with Retry-After."""

    n_compared: int
    n_read: int
    n_refused: int


def loris(folder: Path, slowness: Slowness) -> LorisOutcome:
    """Raises AssertionError where an answer differs, or something is left under way."""
    model = models.write(folder / "tiny", {**models.LLAMA, "vocab_size": 1024})
    preset = tiny_preset(model, server=ServerSpec(port=0))
    with running_behind("gateway", preset, folder) as live:
        outcome = asyncio.run(_Slow(live.url).run(slowness))
        _settled(live)
        return outcome


def _settled(live: Running) -> None:
    wait_until(lambda: live.service.gate.n_inside == 0, "a request is still under way")
    name = {"model": _name(live)}

    def is_idle() -> bool:
        slots = httpx.get(f"{live.url}/slots", params=name, timeout=PATIENCE_S).json()
        return not any(slot["is_processing"] for slot in slots)

    wait_until(is_idle, "a slot is still in use")


def _name(live: Running) -> str:
    cards = httpx.get(f"{live.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    return str(cards[0]["id"])


class _Slow:
    def __init__(self, url: str) -> None:
        self._at = urlsplit(url)
        self._n_refused = 0
        limits = httpx.Limits(max_connections=16)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)

    async def run(self, slowness: Slowness) -> LorisOutcome:
        expected = await self._answer()
        async with AsyncExitStack() as stack:
            for n in range(slowness.n_heads + slowness.n_bodies):
                begun = HEAD.encode() if n < slowness.n_heads else _head(1000)
                _, writer = await self._open(begun)
                stack.push_async_callback(_leave, writer)
                dripping = asyncio.create_task(_drip(writer))
                stack.callback(dripping.cancel)
            for _ in range(slowness.n_silent):
                _, writer = await self._open(_stream(400))
                stack.push_async_callback(_leave, writer)
            for _ in range(slowness.n_vanishing):
                _, writer = await self._open(_stream(400))
                await _leave(writer)
            reading = [self._read_slowly() for _ in range(slowness.n_readers)]
            answers, _ = await asyncio.gather(
                asyncio.gather(*(self._answer() for _ in range(slowness.n_flood))),
                asyncio.gather(*reading),
            )
        assert all(answer == expected for answer in answers)
        await self._client.aclose()
        return LorisOutcome(len(answers), len(reading), self._n_refused)

    async def _answer(self) -> Any:
        """Message of a greedy answer; asked again while the service is full."""
        while True:
            answer = await self._client.post(CHAT, json=chat_body(max_tokens=4, temperature=0))
            if answer.status_code == 200:
                return answer.json()["choices"][0]["message"]
            await self._refuse(answer.status_code, "retry-after" in answer.headers)

    async def _read_slowly(self) -> None:
        """Read a stream in small pieces to its end."""
        while True:
            reader, writer = await self._open(_stream(60))
            received = b""
            while data := await reader.read(64):
                received += data
                await asyncio.sleep(0)
            await _leave(writer)
            if received.startswith(b"HTTP/1.1 200"):
                assert b"[DONE]" in received, received[-200:]
                return
            await self._refuse(int(received.split()[1]), b"retry-after" in received.lower())

    async def _refuse(self, status: int, has_time: bool) -> None:
        assert (status, has_time) == (503, True)
        self._n_refused += 1
        await asyncio.sleep(DRIP_S)

    async def _open(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._at.hostname, self._at.port)
        writer.write(data)
        return reader, writer


async def _leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """One byte at a time, of a header or of a body."""
    writer.write(b"x-slow: ")
    while not writer.is_closing():
        writer.write(b"a")
        await asyncio.sleep(DRIP_S)


def _head(n_bytes: int) -> bytes:
    return f"{HEAD}connection: close\r\ncontent-length: {n_bytes}\r\n\r\n".encode()


def _stream(n_tokens: int) -> bytes:
    body = {**chat_body(max_tokens=n_tokens, ignore_eos=True), "stream": True}
    data = json.dumps(body).encode()
    return _head(len(data)) + data


if __name__ == "__main__":
    print(loris(Path(tempfile.mkdtemp(prefix="loris-")), Slowness()), flush=True)
