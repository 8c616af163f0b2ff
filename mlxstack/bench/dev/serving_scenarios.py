"""Scenes of `bench dev serve` for any OpenAI-compatible server."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.dev.taken_path import taken_path
from mlxstack.bench.dev.timed_request import TimedClient, TimedRequest
from mlxstack.bench.dev.workload import (
    Body,
    RealText,
    Split,
    Yardstick,
    agent,
    next_turn,
    picture,
    question,
    sibling,
)
from mlxstack.bench.servers import Sandbox
from mlxstack.bench.statistics import ratio
from mlxstack.core.errors import BadRequest, Broken

Figures = dict[str, tuple[float, ...]]
"""Figures of a server by name, per pass or per request."""

DECODERS = 3
COUNTS = 26
"""Number of tools that Claude Code counts at once for `/context`."""

CALM_S = 1.0
"""Seconds before a request joins, whose gaps count as the baseline."""


class ServePlan(Struct, frozen=True):
    """Lengths in tokens. `crowd` are numbers of agents; `n_endless` bounds the decoders.

    Decoders run for `lead_s` seconds before a request joins. `team_split` is the prompt of each
    member of a team. Pictures have `picture_side` pixels a side: 4 megapixels. `scenes` are names
    of SCENES. Prompts are `real` text, else random words.
    """

    crowd: tuple[int, ...] = (1, 2, 4, 8)
    n_prompt: int = 200
    n_answer: int = 128
    n_endless: int = 3000
    team: int = 5
    n_turns: int = 5
    n_team_answer: int = 20
    n_clients: int = 8
    n_requests: int = 160
    split: Split = Split()
    team_split: Split = Split().scaled(2050)
    picture_side: int = 2048
    lead_s: float = 1.5
    passes: int = 3
    scenes: tuple[str, ...] = (
        *("turns", "crowds", "short", "joining", "picture", "counts", "team", "requests"),
    )
    real: RealText | None = None

    @property
    def n_slots(self) -> int:
        """Slots that a service needs so that no request waits."""
        return max(*self.crowd, self.team, self.n_clients, DECODERS + 1)

    @property
    def n_ctx(self) -> int:
        """Context that a slot needs."""
        grown = max(self.split.total, self.team_split.total) + self.n_turns * (
            2 * self.n_team_answer + 200
        )
        return 1024 + max(self.n_endless + self.n_prompt, grown)


def on_real_text(plan: ServePlan, real: RealText) -> ServePlan:
    """Same lengths in real text, without tools.

    The template of a small model may not show them.
    """
    split = plan.split.without_tools
    team_split = plan.team_split.without_tools
    return replace(plan, split=split, team_split=team_split, real=real)


FEW = Split(100, 100, 40, 20)
SMALL = ServePlan((1, 2), 30, 12, 2500, 2, 2, 8, 2, 8, FEW, FEW, 64, 0.5, 1)

Scene = Callable[[TimedClient, ServePlan, Yardstick, str], Coroutine[Any, Any, Figures]]
AfterScene = Callable[[str, dict[str, Figures]], Coroutine[Any, Any, None]]
"""Gets the name of a scene that all servers have played, and all figures until then."""


async def play(
    stage: Sandbox, callers: Sequence[TimedClient], plan: ServePlan, after: AfterScene | None = None
) -> dict[str, Figures]:
    """Play all scenes on all servers by turns, `passes` times."""
    yards = {
        caller.server.name: replace(await caller.yardstick(), real=plan.real) for caller in callers
    }
    by_server: dict[str, Figures] = {name: {} for name in yards}
    for i in range(plan.passes):
        for scene in played(plan.scenes):
            for caller in callers if i % 2 == 0 else reversed(callers):
                name = caller.server.name
                stage.say(f"{SCENES[scene].__name__} on {name}, pass {i + 1}")
                before = await caller.counters()
                figures = await SCENES[scene](caller, plan, yards[name], f"{i}")
                figures |= taken_path(scene, before, await caller.counters())
                for figure, values in figures.items():
                    by_server[name][figure] = (*by_server[name].get(figure, ()), *values)
            if after is not None:
                await after(scene, by_server)
    return by_server


def played(names: Sequence[str]) -> tuple[str, ...]:
    """Wanted scenes and their prerequisites, in order.

    Raises BadRequest for a name that none has.
    """
    for name in names:
        if name not in SCENES:
            raise BadRequest(f"there is no scene `{name}`; there is {', '.join(SCENES)}")
    needed = {*names, *(NEEDS[name] for name in names if name in NEEDS)}
    return tuple(name for name in SCENES if name in needed)


async def turns(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Long prompt: cold, repeated, next turn, branch, and sibling."""
    team = 9000 + int(seed)
    body = agent(plan.split, yard, team, 0)
    cold = await caller.request(body, 8)
    again = await caller.request(body, 8)
    later = await caller.request(next_turn(body, again.text, plan.split.new, yard, seed), 8)
    instead = next_turn(body, again.text, plan.split.new, yard, f"branch {seed}")
    branch = await caller.request(instead, 8)
    sibling_request = await caller.request(sibling(body, plan.split.new, yard, f"{team}"), 8)
    return {
        "cold": (cold.ttft_s,),
        "again": (again.ttft_s,),
        "next turn": (later.ttft_s,),
        "branch": (branch.ttft_s,),
        "sibling": (sibling_request.ttft_s,),
        "n cold": (cold.usage.prompt_tokens,),
        "n again": (max(1, again.n_computed),),
        "n next turn": (max(1, later.n_computed),),
        "n known": (later.usage.prompt_tokens,),
    }


async def crowds(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Crowds of agents with short uncached prompts, answered once."""
    figures: Figures = {}
    for n in plan.crowd:
        bodies = [question(plan.n_prompt, yard, f"crowd {seed} {n} {i}") for i in range(n)]
        began = caller.clock()
        timed = await asyncio.gather(*(caller.request(body, plan.n_answer) for body in bodies))
        took = caller.clock() - began
        figures |= {
            f"crowd {n}: seconds": (took,),
            f"crowd {n}: tokens": (
                float(sum(request.usage.completion_tokens for request in timed)),
            ),
            f"crowd {n}: decode": (decode_rate(timed),),
            f"crowd {n}: latency": tuple(request.latency_s for request in timed),
            f"crowd {n}: ttft": tuple(request.ttft_s for request in timed),
            f"crowd {n}: last ttft": (max(request.ttft_s for request in timed),),
        }
    return figures


async def short_answers(
    caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str
) -> Figures:
    """A team with 50 tokens each: one by one, and together."""

    async def ask(warmth: str, i: int) -> TimedRequest:
        return await caller.request(question(plan.n_prompt, yard, f"{warmth} {seed} {i}"), 50)

    began = caller.clock()
    for i in range(plan.team):
        await ask("alone", i)
    between = caller.clock()
    await asyncio.gather(*(ask("together", i) for i in range(plan.team)))
    return {"one by one": (between - began,), "together": (caller.clock() - between,)}


async def interference(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Long prompt that arrives while three agents decode."""
    body = agent(plan.split, yard, 8000 + int(seed), 0)
    joined, calm, gaps = await _while_three_decode(caller, plan, yard, seed, body)
    return {"gaps calm": calm, "gaps joining": gaps, "newcomer": (joined.ttft_s,)}


async def shown(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Large picture that arrives while three agents decode.

    A small one before it, so that the tower is loaded. Nothing of servers that take no images.
    """
    try:
        await caller.request(picture(32, 10, yard, f"first {seed}"), 1)
    except Broken:
        return {}
    body = picture(plan.picture_side, 10, yard, seed)
    joined, calm, gaps = await _while_three_decode(caller, plan, yard, f"shown {seed}", body)
    return {
        "gaps unshown": calm,
        "gaps shown": gaps,
        "picture": (joined.ttft_s,),
        "n picture": (joined.usage.prompt_tokens,),
    }


async def _while_three_decode(
    caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str, body: Body
) -> tuple[TimedRequest, tuple[float, ...], tuple[float, ...]]:
    """A request that joins, and the others' gaps before and meanwhile."""
    enough = asyncio.Event()
    decoding = [
        asyncio.create_task(
            caller.request(
                question(plan.n_prompt, yard, f"decoder {seed} {i}"), plan.n_endless, enough
            )
        )
        for i in range(DECODERS)
    ]
    await asyncio.sleep(plan.lead_s)
    joined = await caller.request(body, 8)
    enough.set()
    decoders = await asyncio.gather(*decoding)
    calm_from = joined.started - CALM_S
    until = joined.started + joined.ttft_s
    calm = _gaps(decoders, calm_from, joined.started)
    gaps = _gaps(decoders, joined.started, until)
    if not gaps:
        raise Broken("the decoders had ended when the other prompt was computed; let them go on")
    return joined, calm, gaps


async def counts(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Token counts of all tools while three agents decode.

    Silences are taken for as long before as from then on. Nothing of servers that do not count.
    """
    if await caller.count(question(10, yard, "whether")) is None:
        return {}
    enough = asyncio.Event()
    bodies = [question(plan.n_prompt, yard, f"counted by {seed} {i}") for i in range(DECODERS)]
    decoding = [
        asyncio.create_task(caller.request(body, plan.n_endless, enough)) for body in bodies
    ]
    await asyncio.sleep(plan.lead_s)
    began = caller.clock()
    asked = [question(plan.n_prompt, yard, f"count {seed} {i}") for i in range(COUNTS)]
    took = await asyncio.gather(*(caller.count(body) for body in asked))
    until = max(caller.clock(), began + CALM_S)
    await asyncio.sleep(max(0.0, until - caller.clock()))
    enough.set()
    decoders = await asyncio.gather(*decoding)
    return {
        "counts": tuple(seconds for seconds in took if seconds is not None),
        "gaps uncounted": _gaps(decoders, began - CALM_S, began),
        "gaps counting": _gaps(decoders, began, until),
    }


def _gaps(decoders: Sequence[TimedRequest], began: float, ended: float) -> tuple[float, ...]:
    return tuple(gap for request in decoders for gap in request.gaps_within(began, ended))


async def team(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Team of agents with one head, by turns, then at once."""
    began = caller.clock()
    await _one_by_one(caller, plan, yard, 100 + int(seed))
    between = caller.clock()
    talks = await asyncio.gather(
        *(_talk(caller, plan, yard, 200 + int(seed), i) for i in range(plan.team))
    )
    took = caller.clock() - between
    reused = [ratio(t.usage.cached_tokens, t.usage.prompt_tokens) for talk in talks for t in talk]
    return {
        "team one by one": (between - began,),
        "team at once": (took,),
        "team first ttft": tuple(talk[0].ttft_s for talk in talks),
        "team later ttft": tuple(request.ttft_s for talk in talks for request in talk[1:]),
        "team reused": tuple(reused),
    }


async def _one_by_one(caller: TimedClient, plan: ServePlan, yard: Yardstick, number: int) -> None:
    bodies = [agent(plan.team_split, yard, number, i) for i in range(plan.team)]
    for turn in range(plan.n_turns):
        for i, body in enumerate(bodies):
            timed = await caller.request(body, plan.n_team_answer)
            seed = f"{number} {turn} {i}"
            bodies[i] = next_turn(body, timed.text, plan.split.new, yard, seed)


async def _talk(
    caller: TimedClient, plan: ServePlan, yard: Yardstick, number: int, member: int
) -> list[TimedRequest]:
    body = agent(plan.team_split, yard, number, member)
    talk = []
    for turn in range(plan.n_turns):
        talk.append(await caller.request(body, plan.n_team_answer))
        seed = f"{number} {turn} {member}"
        body = next_turn(body, talk[-1].text, plan.split.new, yard, seed)
    return talk


async def requests(caller: TimedClient, plan: ServePlan, yard: Yardstick, seed: str) -> Figures:
    """Several clients repeat one warm prompt, one token each."""
    body = question(plan.n_prompt, yard, f"warm {seed}")
    left = iter(range(plan.n_requests))

    async def client() -> None:
        for _ in left:
            await caller.request(body, 1)

    await asyncio.gather(*(caller.request(body, 1) for _ in range(plan.n_clients)))
    began = caller.clock()
    await asyncio.gather(*(client() for _ in range(plan.n_clients)))
    return {"requests per second": (plan.n_requests / (caller.clock() - began),)}


def decode_rate(timed: Sequence[TimedRequest]) -> float:
    """Tokens per second in total, while all are answered."""
    if not all(request.marks for request in timed):
        return 0.0
    start = max(request.marks[0] for request in timed)
    stop = min(request.marks[-1] for request in timed)
    n = sum(
        sum(start < mark <= stop for mark in request.marks) * request.tokens_per_piece
        for request in timed
    )
    return ratio(n, stop - start) if stop > start else 0.0


SCENES: dict[str, Scene] = {
    "turns": turns,
    "crowds": crowds,
    "short": short_answers,
    "joining": interference,
    "picture": shown,
    "counts": counts,
    "team": team,
    "requests": requests,
}
NEEDS = {"joining": "turns"}
"""The newcomer's patience is told against the same prompt cold and alone."""
