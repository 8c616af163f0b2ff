"""Scenes of `bench dev cache`: returning, starting and saved agents."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from mlxstack.bench.dev.in_process_trials import measure
from mlxstack.bench.dev.timed_request import TimedClient, TimedRequest
from mlxstack.bench.dev.trials import BenchResult, LoadFiles
from mlxstack.bench.dev.workload import Body, Split, Yardstick, agent, next_turn, question
from mlxstack.bench.servers import Sandbox, ServerUnderTest, service
from mlxstack.client.client import Client
from mlxstack.core.errors import Broken
from mlxstack.core.preset import SlotSpec

ANSWER = 8
"""Tokens of an answer of which only the first one is timed."""

BLOCK = 128
ROOM = 1024
STRANGER = 300
"""Tokens of the prompt that takes the slot of an agent."""


class CachePlan(Struct, frozen=True):
    """Plan: prompt lengths `totals`, and `n_big` for a saved context.

    Two others decode `n_decode` tokens at most, for `calm_s` seconds before and after the save.
    It is restored by `n_restarts` services, one after the other.
    """

    totals: tuple[int, ...] = (1000, 2000, 4050)
    team: int = 5
    team_total: int = 4050
    n_big: int = 12_500
    n_turns: int = 10
    n_decode: int = 2000
    calm_s: float = 1.0
    n_restarts: int = 7
    passes: int = 3


SMALL = CachePlan((300, 500), 3, 600, 600, 4, 1500, 0.2, 1, 1)


SlotAnswer = dict[str, Any]
"""JSON of a save or restore of a slot."""


class Returns(Struct, frozen=True):
    """One prompt length: cold, then found in slot, memory, disk."""

    total: int
    cold: tuple[TimedRequest, ...]
    same: tuple[TimedRequest, ...]
    hot: tuple[TimedRequest, ...]
    warm: tuple[TimedRequest, ...]


class Start(Struct, frozen=True):
    """Team start: prompt tokens computed, and the minimum."""

    timed: tuple[TimedRequest, ...]
    n_computed: int
    n_least: int
    n_alone: int


class Saves(Struct, frozen=True):
    """Saves: `turns` after each turn; gaps of other agents' tokens.

    `restored` and `loaded` are the first thing that a new process reads, by turns.
    """

    turns: tuple[SlotAnswer, ...]
    big: SlotAnswer
    cold_s: float
    restored: tuple[SlotAnswer, ...]
    loaded: tuple[BenchResult, ...]
    gaps_before: tuple[float, ...]
    gaps_during: tuple[float, ...]


async def returns(stage: Sandbox, plan: CachePlan) -> tuple[Returns, ...]:
    """Returning agents in one slot: parked, resumed, restarted."""
    slots = SlotSpec(count=1, n_ctx=max(plan.totals) + ROOM)
    seen: dict[int, list[tuple[TimedRequest, TimedRequest, TimedRequest, Body]]] = {
        n: [] for n in plan.totals
    }
    async with service(stage, "returns", slots) as server, TimedClient(server) as caller:
        yard = await caller.yardstick()
        for total, team in itertools.product(plan.totals, range(plan.passes)):
            stage.say(f"an agent of {total} tokens, pass {team + 1}")
            body = agent(Split().scaled(total), yard, 1000 * total + team, 0)
            seen[total].append(await _comes_and_goes(caller, body, yard, f"{total} {team}"))
    stage.say("the same agents after a restart")
    async with service(stage, "returns", slots) as server, TimedClient(server) as caller:
        await caller.request(question(STRANGER, yard, "first of the day"), ANSWER)
        warm = {
            total: [await caller.request(body, ANSWER) for *_, body in places]
            for total, places in seen.items()
        }
    return tuple(
        Returns(
            total,
            cold=tuple(cold for cold, *_ in places),
            same=tuple(same for _, same, *_ in places),
            hot=tuple(hot for *_, hot, _ in places),
            warm=tuple(warm[total]),
        )
        for total, places in seen.items()
    )


async def _comes_and_goes(
    caller: TimedClient, body: Body, yard: Yardstick, seed: str
) -> tuple[TimedRequest, TimedRequest, TimedRequest, Body]:
    """Cold turn, next turn in slot and from memory, next body."""
    n_new = Split().new
    cold = await caller.request(body, ANSWER)
    body = next_turn(body, cold.text, n_new, yard, f"{seed} a")
    same = await caller.request(body, ANSWER)
    await caller.request(question(STRANGER, yard, f"{seed} a"), ANSWER)
    body = next_turn(body, same.text, n_new, yard, f"{seed} b")
    hot = await caller.request(body, ANSWER)
    await caller.request(question(STRANGER, yard, f"{seed} b"), ANSWER)
    return cold, same, hot, next_turn(body, hot.text, n_new, yard, f"{seed} c")


async def team_starts(stage: Sandbox, plan: CachePlan) -> tuple[Start, ...]:
    """New teams with new heads, all members at once."""
    slots = SlotSpec(count=plan.team, n_ctx=plan.team_total + ROOM)
    starts = []
    async with service(stage, "team", slots) as server, TimedClient(server) as caller:
        yard = await caller.yardstick()
        for team in range(plan.passes):
            stage.say(f"a team of {plan.team} starts, pass {team + 1}")
            split = Split().scaled(plan.team_total)
            bodies = [agent(split, yard, team, i) for i in range(plan.team)]
            before = await computed(server)
            timed = await asyncio.gather(*(caller.request(body, ANSWER) for body in bodies))
            n_computed = await computed(server) - before
            head = await _shared(server, bodies)
            lengths = [request.usage.prompt_tokens for request in timed]
            n_least = sum(lengths) - (len(bodies) - 1) * head
            starts.append(Start(tuple(timed), n_computed, n_least, sum(lengths)))
    return tuple(starts)


async def saves(stage: Sandbox, plan: CachePlan) -> Saves:
    """Saves of ten turns, and of a context beside decoding agents."""
    slots = SlotSpec(count=3, n_ctx=max(plan.n_big, 2 * plan.n_decode, 2048) + ROOM)
    async with (
        service(stage, "saves", slots) as server,
        TimedClient(server) as caller,
        Client(server.url) as client,
    ):
        yard = await caller.yardstick()
        stage.say(f"{plan.n_turns} turns with a save after each")
        turns = await _saved_turns(caller, client, plan, yard)
        stage.say(f"a context of {plan.n_big} tokens is saved while others decode")
        big = question(plan.n_big, yard, "big")
        cold = await caller.request(big, ANSWER, id_slot=0)
        before, _ = await _gaps(caller, client, plan, yard, None)
        during, saved = await _gaps(caller, client, plan, yard, "big")
        assert saved is not None
    restored = []
    loaded = []
    for i in range(plan.n_restarts):
        stage.say(f"and restored by a new service, {i + 1} of {plan.n_restarts}")
        async with service(stage, "saves", slots) as server, Client(server.url) as client:
            restored.append(await _slot_action(client, 1, "restore", "big"))
        loaded += measure(stage, [LoadFiles(str(stage.folder / "saves" / "kv"))])
    return Saves(turns, saved, cold.ttft_s, tuple(restored), tuple(loaded), before, during)


async def _slot_action(client: Client, slot: int, action: str, name: str) -> SlotAnswer:
    return await client.post(f"/slots/{slot}?action={action}", {"filename": name})


async def _saved_turns(
    caller: TimedClient, client: Client, plan: CachePlan, yard: Yardstick
) -> tuple[SlotAnswer, ...]:
    body = agent(Split(200, 0, 200, 50), yard, 77, 0)
    saved = []
    for i in range(plan.n_turns):
        answer = await caller.request(body, 4 * ANSWER, id_slot=1)
        saved.append(await _slot_action(client, 1, "save", "diary"))
        body = next_turn(body, answer.text, Split().new, yard, f"diary {i}")
    return tuple(saved)


async def _gaps(
    caller: TimedClient, client: Client, plan: CachePlan, yard: Yardstick, name: str | None
) -> tuple[tuple[float, ...], SlotAnswer | None]:
    """Token gaps of two decoders, with and without slot saves."""
    enough = asyncio.Event()
    requests = [
        asyncio.create_task(
            caller.request(
                question(50, yard, f"{name} {slot}"), plan.n_decode, enough, id_slot=slot
            )
        )
        for slot in (1, 2)
    ]
    await asyncio.sleep(plan.calm_s)
    began = caller.clock()
    saved = await _slot_action(client, 0, "save", name) if name else None
    ended = caller.clock()
    await asyncio.sleep(plan.calm_s)
    enough.set()
    timed = await asyncio.gather(*requests)
    if saved is None:
        return tuple(gap for request in timed for gap in request.gaps), None
    gaps = tuple(gap for request in timed for gap in request.gaps_within(began, ended))
    if not gaps:
        raise Broken("the save was over before the others had a token; save a bigger context")
    return gaps, saved


async def computed(server: ServerUnderTest) -> int:
    """Prompt tokens that the service has computed since it started."""
    async with Client(server.url) as client:
        families = text_string_to_metric_families(await client.metrics())
    metrics = {s.name: s.value for family in families for s in family.samples}
    return int(metrics["llamacpp:prompt_tokens_total"])


async def _shared(server: ServerUnderTest, bodies: Sequence[Body]) -> int:
    """Length of these prompts' shared prefix, in tokens."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        lists = []
        for body in bodies:
            text = (await http.post("/apply-template", json=body)).raise_for_status().json()
            asked = {"content": text["prompt"], "parse_special": True}
            lists.append((await http.post("/tokenize", json=asked)).json()["tokens"])
    same = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*lists, strict=False))
    return sum(1 for _ in same)
