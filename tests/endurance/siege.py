"""A siege: more clients than slots, slow and silent readers, the vanishing, the huge, the idle.

Afterwards everything is as before: descriptors, slots, memory, the books, and the answer.
"""

import asyncio
import json
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from msgspec import Struct

from tests.endurance.roundabout import house_of
from tests.endurance.tally import Counted, read_counters
from tests.endurance.worker import Worker

HUGE = 100_000_000
CHUNK = b"x" * 65536
WAIT_S = 240.0
REST_S = 60.0
"""Seconds after a siege until its memory has to be back."""
MAX_GROWN = 1.1
"""Memory kept at rest, against after the first siege."""
FAIR = 4.0
"""Who is let into a full queue waits for as long as everybody else; at most so many medians."""
BODY = {"messages": [{"role": "user", "content": "the pear and the boat"}], "temperature": 0}
"""What everybody asks."""


class Force(Struct, frozen=True):
    """How many of each kind come; all but the tiny ones at once. Memory is weighed at rest."""

    n_clients: int = 200
    n_slow: int = 20
    n_silent: int = 20
    n_vanishing: int = 40
    n_huge: int = 6
    n_feeds: int = 500
    n_tiny: int = 350_000
    rest_s: float = REST_S
    most_kept: float = 1.15
    """Memory kept at rest, against before the first siege."""
    most_wait: float = FAIR
    """Longest wait, in medians."""


class Outcome(Struct, frozen=True):
    """`n_refused` were told to come again, and did. Bytes are resident memory of the service,
    `bytes_after` at rest.

    `wait_*` are from a request that was taken to its answer, while all came at once.
    """

    n_served: int
    n_refused: int
    n_slow_served: int
    n_too_large: int
    n_feeds: int
    n_tiny: int
    wait_p50_s: float
    wait_worst_s: float
    bytes_before: int
    bytes_most: int
    bytes_after: int


def siege(root: Path, force: Force, n_times: int = 1) -> list[Outcome]:
    """Lay several sieges to one service. Raises AssertionError when something is not as before."""
    house = house_of(root)
    house.start()
    try:
        outcomes = [asyncio.run(_Siege(house, force).run()) for _ in range(n_times)]
    finally:
        house.end()
    before = outcomes[0].bytes_before
    first = outcomes[0].bytes_after
    for outcome in outcomes:
        assert outcome.bytes_after <= force.most_kept * before, outcomes
        assert outcome.bytes_after <= MAX_GROWN * first, outcomes
    return outcomes


class _Siege:
    def __init__(self, house: Worker, force: Force) -> None:
        self._url = house.url
        self._force = force
        self._process = psutil.Process(house.pid)
        self._most = 0
        self._n_refused = 0
        self._waits: list[float] = []
        self._client = httpx.AsyncClient(
            base_url=house.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None)
        )

    async def run(self) -> Outcome:
        expected = await self._answer()
        await asyncio.gather(*(self._answer() for _ in range(8)))
        await self._calm()
        before = self._weigh()
        n_open = self._process.num_fds()
        watching = asyncio.create_task(self._watch())
        feeds = await asyncio.gather(*(self._feed() for _ in range(self._force.n_feeds)))
        self._waits.clear()
        served, slow, too_large = await self._all_at_once(expected)
        waits = tuple(self._waits)
        assert max(waits) <= self._force.most_wait * statistics.median(waits), (
            "some waited far longer than others"
        )
        for feed in feeds:
            feed.close()
        n_tiny = await self._tiny()
        await self._calm()
        watching.cancel()
        assert await self._answer() == expected, "the answer is another one after the siege"
        await self._client.aclose()
        await self._descriptors(n_open)
        after = await self._rested(before)
        return Outcome(
            n_served=served,
            n_refused=self._n_refused,
            n_slow_served=slow,
            n_too_large=too_large,
            n_feeds=len(feeds),
            n_tiny=n_tiny,
            wait_p50_s=statistics.median(waits),
            wait_worst_s=max(waits),
            bytes_before=before,
            bytes_most=self._most,
            bytes_after=after,
        )

    async def _all_at_once(self, expected: str) -> tuple[int, int, int]:
        force = self._force
        silent = await asyncio.gather(*(self._silent() for _ in range(force.n_silent)))
        patient = [self._answer() for _ in range(force.n_clients)]
        slow = [self._slow() for _ in range(force.n_slow)]
        huge = [self._huge(is_chunked=n % 2 == 1) for n in range(force.n_huge)]
        vanishing = [self._vanish(n) for n in range(force.n_vanishing)]
        answers, heard, refused, _ = await asyncio.gather(
            asyncio.gather(*patient),
            asyncio.gather(*slow),
            asyncio.gather(*huge),
            asyncio.gather(*vanishing),
        )
        for writer in silent:
            writer.close()
        assert all(answer == expected for answer in answers)
        return len(answers), sum(heard), sum(refused)

    async def _answer(self) -> str:
        """Comes again until it is served."""
        while True:
            asked = time.monotonic()
            answer = await self._client.post("/v1/chat/completions", json={**BODY, "max_tokens": 6})
            if answer.status_code == 200:
                self._waits.append(time.monotonic() - asked)
                return json.dumps(answer.json()["choices"][0]["message"])
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            self._n_refused += 1
            await asyncio.sleep(0.1)

    async def _slow(self) -> bool:
        """Reads a few bytes at a time; whether it heard the end, not a refusal."""
        while True:
            reader, writer = await self._ask({**BODY, "stream": True, "max_tokens": 60})
            heard = b""
            while data := await reader.read(64):
                heard += data
                await asyncio.sleep(0.002)
            writer.close()
            if b" 200 " in heard[:20]:
                return b"[DONE]" in heard
            assert b" 503 " in heard[:20], heard
            await asyncio.sleep(0.1)

    async def _silent(self) -> asyncio.StreamWriter:
        """Asks for much, and never reads."""
        return (await self._ask({**BODY, "stream": True, "max_tokens": 400}))[1]

    async def _vanish(self, n: int) -> None:
        """Leaves in the middle of its words, or right after them."""
        _, writer = await self._ask({**BODY, "stream": n % 2 == 0}, cut=5 if n % 3 == 0 else None)
        await asyncio.sleep(0.01 * (n % 5))
        writer.transport.abort()

    async def _huge(self, *, is_chunked: bool) -> bool:
        """Whether 100 MB were refused, by their announcement or on their way."""
        reader, writer = await self._open()
        length = "transfer-encoding: chunked" if is_chunked else f"content-length: {HUGE}"
        writer.write(_head("/v1/chat/completions", length))
        with suppress(ConnectionError):
            for _ in range(HUGE // len(CHUNK)):
                writer.write(b"10000\r\n" + CHUNK + b"\r\n" if is_chunked else CHUNK)
                await writer.drain()
                if reader.at_eof() or writer.is_closing():
                    break
        with suppress(ConnectionError):
            heard = await asyncio.wait_for(reader.read(200), 60)
            writer.close()
            return b" 413 " in heard[:20]
        return True

    async def _feed(self) -> asyncio.StreamWriter:
        """A watcher that sees the first frame, and looks no more."""
        reader, writer = await self._open()
        writer.write(_head("/events", "content-length: 0", "GET"))
        await asyncio.wait_for(reader.readuntil(b"event: frame"), 60)
        return writer

    async def _tiny(self) -> int:
        """Many requests that want next to nothing. A client library would take most of the time."""
        left = self._force.n_tiny
        body = b'{"content":"pear"}'
        request = _head("/tokenize", f"content-length: {len(body)}") + body

        async def some() -> None:
            nonlocal left
            reader, writer = await self._open()
            while left > 0:
                left -= 1
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in head[:20], head
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            writer.close()

        await asyncio.gather(*(some() for _ in range(16)))
        return self._force.n_tiny

    async def _ask(
        self, body: dict[str, Any], cut: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._open()
        data = json.dumps(body).encode()
        length = f"content-length: {len(data)}\r\nconnection: close"
        writer.write(_head("/v1/chat/completions", length) + data[:cut])
        return reader, writer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = urlsplit(self._url)
        return await asyncio.open_connection(place.hostname, place.port)

    async def _watch(self) -> None:
        while True:
            self._most = max(self._most, self._weigh())
            await asyncio.sleep(0.05)

    def _weigh(self) -> int:
        return int(self._process.memory_info().rss)

    async def _rested(self, before: int) -> int:
        """Bytes at rest; after `rest_s`, as soon as they are few enough."""
        begun = time.monotonic()
        while (rested_s := time.monotonic() - begun) < REST_S:
            if rested_s >= self._force.rest_s and self._weigh() <= self._force.most_kept * before:
                break
            await asyncio.sleep(0.1)
        return self._weigh()

    async def _calm(self) -> None:
        """Nothing is under way, and all who came have ended."""
        for _ in range(3000):
            counted: Counted = await asyncio.to_thread(read_counters, self._url)
            ended = counted.n_completed + counted.n_cancelled + counted.n_failed
            if counted.is_idle and ended == counted.n_requests:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"it does not come to rest: {counted}")

    async def _descriptors(self, before: int) -> None:
        for _ in range(500):
            if self._process.num_fds() <= before:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self._process.num_fds()} descriptors are open, {before} before")


def _head(path: str, length: str, method: str = "POST") -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*lines, length, "", "")).encode()
