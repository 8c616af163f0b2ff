"""Sessions of many agents on one server, so many at a time."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.bench.fleet import wire
from mlxstack.bench.fleet.session import PromptedRequest, RecordedSession, requests
from mlxstack.bench.fleet.wire import FleetDialect, StreamedAnswer
from mlxstack.bench.servers import ServerUnderTest
from mlxstack.bench.stream_client import StreamClient
from mlxstack.core.errors import Broken


class FleetPlan(Struct, frozen=True):
    """Sessions, widths and how requests are sent."""

    sessions: tuple[RecordedSession, ...]
    """Agents take them one after another."""
    widths: tuple[int, ...] = (1, 2, 4, 8)
    """Agents at a time."""
    n_agents: int = 8
    """Sessions that are played at each width."""
    dialect: FleetDialect = FleetDialect.OPENAI
    pauses: float = 1.0
    """Factor of the recorded pauses."""
    max_requests: int | None = None
    """Turns of each session; None: all."""
    is_text: bool = False
    """Whether tools, calls and results are sent as text."""
    extra: Mapping[str, Any] = {}
    """Members of each body beside the session's."""


class AnsweredRequest(Struct, frozen=True):
    """One request and its answer, times in seconds."""

    agent: int
    request: PromptedRequest
    answer: StreamedAnswer
    ttft_s: float
    seconds: float
    is_left: bool = False

    @property
    def longest_gap_s(self) -> float:
        """Longest silence between two pieces of the answer."""
        moments = [piece.moment for piece in self.answer.pieces]
        return max((later - earlier for earlier, later in pairwise(moments)), default=0.0)


class PlayedRun(Struct, frozen=True):
    """All sessions on one server at one width."""

    seconds: float
    session_s: tuple[float, ...]
    answered: tuple[AnsweredRequest, ...]
    n_equal: int
    """Last answers of agents that were the same when they were asked for again, alone."""
    n_compared: int

    @property
    def rate_per_minute(self) -> float:
        """Requests of all agents in a minute."""
        return 60 * len(self.answered) / self.seconds


class FleetClient:
    """Requests of all agents to one server, over connections of their own."""

    def __init__(self, server: ServerUnderTest, plan: FleetPlan) -> None:
        self._server = server
        self._plan = plan
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._streams = StreamClient(server.url, headers)

    async def close(self) -> None:
        """Close idle connections."""
        await self._streams.close()

    async def play(self, run: str, width: int) -> PlayedRun:
        """Play all sessions, `width` at a time. `run` stands in each prompt.

        Raises Broken where the server refuses a request, Unreachable where it does not answer.
        """
        queue = list(range(self._plan.n_agents))
        answered: list[AnsweredRequest] = []
        session_s: list[float] = []

        async def work() -> None:
            while queue:
                agent = queue.pop(0)
                session_began = time.perf_counter()
                answered.extend(await self._session(run, agent))
                session_s.append(time.perf_counter() - session_began)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(width)))
        seconds = time.perf_counter() - began
        compared = list(_last_answers(answered))
        n_equal = 0
        for together in compared:
            alone = await self._ask(together.agent, together.request)
            n_equal += alone.answer.text == together.answer.text
        return PlayedRun(seconds, tuple(session_s), tuple(answered), n_equal, len(compared))

    async def _session(self, run: str, agent: int) -> list[AnsweredRequest]:
        session = self._plan.sessions[agent % len(self._plan.sessions)]
        answered = []
        for request in list(requests(session, run, agent))[: self._plan.max_requests]:
            await asyncio.sleep(request.pause_s * self._plan.pauses)
            answered.append(await self._ask(agent, request))
        return answered

    async def _ask(self, agent: int, request: PromptedRequest) -> AnsweredRequest:
        plan = self._plan
        prepared = wire.as_text(request) if plan.is_text else request
        body = {**wire.body(prepared, plan.dialect, self._server.model), **plan.extra}
        stream = _Leaving(request.leave_after)
        received = await self._streams.post(
            wire.path(plan.dialect), msgspec.json.encode(body), stream.is_over
        )
        if not 200 <= received.status < 300:
            reason = received.body.decode(errors="replace")[:300]
            raise Broken(f"{self._server.name} answered HTTP {received.status}: {reason}")
        answer = wire.read(received.pieces, plan.dialect)
        first = answer.pieces[0].moment if answer.pieces else received.ended
        return AnsweredRequest(
            agent=agent,
            request=request,
            answer=answer,
            ttft_s=first - received.started,
            seconds=received.ended - received.started,
            is_left=request.leave_after > 0,
        )


class _Leaving:
    """Whether a client leaves now: after so many reads of the answer."""

    def __init__(self, n_reads: int) -> None:
        self._n_reads = n_reads
        self._n_seen = 0

    def is_over(self) -> bool:
        self._n_seen += 1
        return 0 < self._n_reads <= self._n_seen


def _last_answers(answered: Sequence[AnsweredRequest]) -> Iterator[AnsweredRequest]:
    """Last whole answer of each agent."""
    by_agent = {request.agent: request for request in answered if not request.is_left}
    yield from by_agent.values()


async def play_all(
    servers: Sequence[ServerUnderTest], plan: FleetPlan, run: str
) -> dict[str, dict[int, PlayedRun]]:
    """Play each width on one server after another; results by server and width."""
    played: dict[str, dict[int, PlayedRun]] = {server.name: {} for server in servers}
    async with AsyncExitStack() as stack:
        clients = {}
        for server in servers:
            clients[server.name] = FleetClient(server, plan)
            stack.push_async_callback(clients[server.name].close)
        for n, width in enumerate(plan.widths):
            # The order changes, so that none is always the first one.
            shift = n % len(servers)
            for server in [*servers[shift:], *servers[:shift]]:
                run_name = f"{run}-{width}"
                played[server.name][width] = await clients[server.name].play(run_name, width)
    return played
