"""`bench dev person`: first token of a person's turn beside sub-agents."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import httpx
from msgspec import Struct

from mlxstack.bench.dev.timed_request import TimedClient
from mlxstack.bench.dev.workload import Body, Yardstick, question
from mlxstack.bench.report import ReportTable, Results, at_most
from mlxstack.bench.servers import Sandbox, ServerUnderTest, service
from mlxstack.bench.statistics import lasting, percentile, ratio
from mlxstack.core.preset import SlotSpec

PATH = "/v1/chat/completions"
N_SUBAGENTS = 3
SUBAGENT = "x-claude-code-agent-id"
LIMIT = 1.2
SETTLE_S = 0.5
"""Pause after the start or end of the sub-agents."""


class SubagentLoad(Struct, frozen=True):
    """Load of a sub-agent, in tokens of each prompt and answer."""

    name: str
    n_prompt: int
    n_answer: int


LOADS = (
    SubagentLoad("decode", 100, 2000),
    SubagentLoad("prefill", 3000, 1),
    SubagentLoad("do both", 1500, 300),
)


class PersonPlan(Struct, frozen=True):
    """`passes` alternating turns of `n_prompt` new tokens, alone and beside each load."""

    passes: int = 3
    n_prompt: int = 3000
    n_ctx: int = 4096
    loads: tuple[SubagentLoad, ...] = LOADS


SMALL = PersonPlan(1, 300, 1024, (SubagentLoad("do both", 200, 50),))


async def run(stage: Sandbox, plan: PersonPlan) -> Results:
    """Alternate between alone and beside; four slots, so that one is free."""
    slots = SlotSpec(count=N_SUBAGENTS + 1, n_ctx=plan.n_ctx)
    async with service(stage, "person", slots) as server:
        async with TimedClient(server) as caller:
            yard = await caller.yardstick()
        numbers = count()
        alone: dict[str, list[float]] = {load.name: [] for load in plan.loads}
        beside: dict[str, list[float]] = {load.name: [] for load in plan.loads}
        await _first_token_s(server, question(plan.n_prompt, yard, "warm"))
        for number in range(plan.passes):
            for load in plan.loads:
                stage.say(f"three sub-agents that {load.name}, round {number + 1}")
                body = question(plan.n_prompt, yard, f"alone {next(numbers)}")
                alone[load.name].append(await _first_token_s(server, body))
                async with _busy(server, load, yard, next(numbers)):
                    body = question(plan.n_prompt, yard, f"beside {next(numbers)}")
                    beside[load.name].append(await _first_token_s(server, body))
    return _results(alone, beside, plan)


def _results(
    alone: dict[str, list[float]], beside: dict[str, list[float]], plan: PersonPlan
) -> Results:
    shares = {
        name: ratio(percentile(beside[name], 50), percentile(alone[name], 50)) for name in alone
    }
    rows = tuple(
        (name, lasting(alone[name]), lasting(beside[name]), f"{shares[name]:.2f} x")
        for name in alone
    )
    note = f"A cold prompt of {plan.n_prompt} tokens, whose client sends no mark of a sub-agent"
    table = ReportTable(
        "First token of a person's turn",
        ("Three sub-agents", "Alone", "Beside them", "Ratio of medians"),
        rows,
        note,
    )
    targets = tuple(
        at_most(f"beside sub-agents that {name}", share, LIMIT) for name, share in shares.items()
    )
    samples = {f"{name}: alone s": tuple(values) for name, values in alone.items()}
    samples |= {f"{name}: beside s": tuple(values) for name, values in beside.items()}
    return Results((table,), targets, samples)


@asynccontextmanager
async def _busy(
    server: ServerUnderTest, load: SubagentLoad, yard: Yardstick, number: int
) -> AsyncIterator[None]:
    """Three sub-agents, each with a request under way at any time."""
    tasks = [
        asyncio.create_task(_work(server, load, yard, f"{number} {i}")) for i in range(N_SUBAGENTS)
    ]
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)


async def _work(server: ServerUnderTest, load: SubagentLoad, yard: Yardstick, seed: str) -> None:
    async with _client(server, {SUBAGENT: f"a{seed.replace(' ', '')}"}) as http:
        for turn_number in count():
            body = question(load.n_prompt, yard, f"sub-agent {seed} {turn_number}")
            more = {"max_tokens": load.n_answer, "ignore_eos": True, "model": server.model}
            (await http.post(PATH, json={**body, **more})).raise_for_status()


async def _first_token_s(server: ServerUnderTest, body: Body) -> float:
    """Seconds of an answer of one token."""
    async with _client(server, {}) as http:
        began = time.perf_counter()
        more = {"max_tokens": 1, "model": server.model}
        (await http.post(PATH, json={**body, **more})).raise_for_status()
        return time.perf_counter() - began


def _client(server: ServerUnderTest, headers: dict[str, str]) -> httpx.AsyncClient:
    key = {"authorization": f"Bearer {server.api_key}"}
    return httpx.AsyncClient(
        base_url=server.url, headers={**key, **headers}, timeout=600.0, trust_env=False
    )
