"""Timed HTTP request: arrival of each piece at its client."""

import asyncio
import re
import time
from itertools import pairwise
from random import Random
from typing import Any, Self

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from mlxstack.bench.dev.workload import WORDS, Body, Yardstick, question, tool
from mlxstack.bench.servers import ServerUnderTest
from mlxstack.bench.stream_client import Pieces, StreamClient, event_data
from mlxstack.client.types import CallUsage, ChatResponse
from mlxstack.core.errors import Broken

PATH = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"
SAVED = "x-mlx-stack-ttft-saved-ms"
BEGUN = "x-mlx-stack-begun-early"
ALIKE = {
    "temperature": 0,
    "chat_template_kwargs": {"enable_thinking": False},
    "stream_options": {"include_usage": True},
    "stream": True,
    "stop_loops": False,
}
"""Sent to every server, so that all do the same work. Random models repeat themselves."""

TIMEOUT = httpx.Timeout(900.0, connect=5.0)


class TimedRequest(Struct, frozen=True):
    """Seconds on one clock; `marks` are arrivals of text pieces.

    `told_s` is what the server says that it saved of the time to the first token, `n_begun` and
    `n_used` the tokens that it began early, and used.
    """

    started: float
    marks: tuple[float, ...]
    ended: float
    usage: CallUsage = CallUsage()
    text: str = ""
    told_s: float = 0.0
    n_begun: int = 0
    n_used: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds until the first piece of text."""
        return (self.marks[0] if self.marks else self.ended) - self.started

    @property
    def latency_s(self) -> float:
        """Seconds until the end of the stream."""
        return self.ended - self.started

    @property
    def gaps(self) -> tuple[float, ...]:
        """Silence before each piece but the first."""
        return tuple(b - a for a, b in pairwise(self.marks))

    def gaps_within(self, began: float, ended: float) -> tuple[float, ...]:
        """The silences that lie at least partly between these times."""
        return tuple(b - a for a, b in pairwise(self.marks) if b > began and a < ended)

    @property
    def tokens_per_piece(self) -> float:
        """Tokens of a piece of text; 1 where each token is one."""
        n_tokens = self.usage.completion_tokens
        if n_tokens and self.marks:
            return n_tokens / len(self.marks)
        return 1.0

    @property
    def n_computed(self) -> int:
        """Prompt tokens that the server did not reuse."""
        return self.usage.prompt_tokens - self.usage.cached_tokens


class TimedClient:
    """Streams from one server; bytes are parsed afterwards, outside timing."""

    def __init__(self, server: ServerUnderTest) -> None:
        self.server = server
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=TIMEOUT, trust_env=False
        )
        self._streams = StreamClient(server.url, headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections."""
        await self._streams.close()
        await self._http.aclose()

    @staticmethod
    def clock() -> float:
        """Now, in the seconds of `TimedRequest`."""
        return time.perf_counter()

    async def request(
        self, body: Body, max_tokens: int, enough: asyncio.Event | None = None, **more: Any
    ) -> TimedRequest:
        """Streamed chat completion, left after `enough` is set.

        Raises Broken when the server refuses, Unreachable when it does not answer.
        """
        asked = {"model": self.server.model, "max_tokens": max_tokens, **ALIKE, **body, **more}
        is_enough = enough.is_set if enough is not None else bool
        answer = await self._streams.post(PATH, msgspec.json.encode(asked), is_enough)
        if not 200 <= answer.status < 300:
            reason = answer.body.decode(errors="replace")
            raise Broken(f"{self.server.name} answered HTTP {answer.status}: {reason[:300]}")
        told_s = float(answer.headers.get(SAVED, "0")) / 1e3
        begun = [int(n) for n in re.findall(r"\d+", answer.headers.get(BEGUN, "0 0"))]
        done = timed(answer.started, answer.pieces, answer.ended)
        return replace(done, told_s=told_s, n_begun=begun[0], n_used=begun[1])

    async def get(self, path: str) -> Any:
        """A document of the server. Raises Broken when it has none."""
        answer = await self._http.get(path)
        if not answer.is_success:
            raise Broken(f"{self.server.name} answered HTTP {answer.status_code} for {path}")
        return answer.json()

    async def counters(self) -> dict[str, float]:
        """Samples of `/metrics` without labels; none without the page."""
        answer = await self._http.get("/metrics")
        if not answer.is_success or "# TYPE" not in answer.text:
            return {}
        families = text_string_to_metric_families(answer.text)
        return {s.name: s.value for family in families for s in family.samples if not s.labels}

    async def count(self, body: Body) -> float | None:
        """Seconds to count a prompt's tokens; None without that endpoint."""
        started = time.perf_counter()
        answer = await self._http.post(COUNT, json={"model": self.server.model, **body})
        if answer.is_success:
            return time.perf_counter() - started
        return None

    async def yardstick(self) -> Yardstick:
        """Count the tokens of our words and tools on this server."""
        few = " ".join(WORDS)
        many = " ".join(WORDS * 5)
        short_prompt = await self._n_prompt({"messages": [{"role": "user", "content": few}]})
        five = await self._n_prompt({"messages": [{"role": "user", "content": many}]})
        tools = [tool(Random(f"tool {i}")) for i in range(4)]
        two = {**question(10, Yardstick(), "tools"), "tools": tools[:2]}
        four = {**two, "tools": tools}
        n_tools = await self._n_prompt(four) - await self._n_prompt(two)
        word = (five - short_prompt) / (4 * len(WORDS))
        return Yardstick(word=max(0.1, word), tool=max(1.0, n_tools / 2))

    async def _n_prompt(self, body: Body) -> int:
        return (await self.request(body, 1)).usage.prompt_tokens


def timed(started: float, arrived: Pieces, ended: float) -> TimedRequest:
    """Parsed `data: JSON` events with their arrival times."""
    marks = []
    text = []
    usage = CallUsage()
    for moment, data in event_data(arrived):
        chat_chunk = _chat(data)
        usage = chat_chunk.usage or usage
        content = "".join(
            (c.delta.content or "") + (c.delta.reasoning_content or "") for c in chat_chunk.choices
        )
        if content:
            marks.append(moment)
            text.append(content)
    return TimedRequest(started, tuple(marks), ended, usage, "".join(text))


def _chat(data: bytes) -> ChatResponse:
    try:
        return msgspec.json.decode(data, type=ChatResponse)
    except msgspec.MsgspecError as why:
        raise Broken(f"the stream holds something unexpected: {data[:200]!r} ({why})") from why
