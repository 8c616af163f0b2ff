"""`bench dev early`: turns after a pause, and their cost for others."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from random import Random
from typing import Any

from msgspec import Struct, structs

from mlxstack.bench.dev.serving_scenarios import CALM_S, DECODERS, Figures
from mlxstack.bench.dev.steal import TRIES, told, undisturbed
from mlxstack.bench.dev.timed_request import TimedClient
from mlxstack.bench.dev.workload import Body, Yardstick, question, text, tool
from mlxstack.bench.report import BenchTarget, ReportTable, Results, at_least, at_most
from mlxstack.bench.servers import Sandbox, service
from mlxstack.bench.statistics import lasting, percentile, ratio, spread
from mlxstack.core.errors import Broken
from mlxstack.core.preset import Anticipation, PrefixCacheSpec, SlotSpec

AUTO = "auto"
OFF = "off"
POLL_S = 0.05
WAIT_S = 600.0
ANSWER = {"grammar": "root ::= [0-9] [0-9] [0-9] [0-9]", "tool_choice": "none"}
"""Complete answer of four tokens: a cut one begins no turn."""

TEMPLATE = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}
    {%- if m.reasoning_content and loop.index0 > ns.last -%}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
        {%- set said = {'name': call.function.name, 'arguments': call.function.arguments} -%}
        {{- '\\n<tool_call>\\n' + said | tojson + '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Writes reasoning until the user speaks again, as Qwen3 and GLM-4 do."""


Scene = Callable[..., Awaitable[Figures]]


class EarlyPlan(Struct, frozen=True):
    """Tool loops of `n_calls` calls with reasoning, and `n_loops` pauses."""

    n_head: int = 300
    n_calls: int = 4
    n_thought: int = 150
    n_result: int = 250
    n_new: int = 40
    n_prompt: int = 200
    n_endless: int = 6000
    n_loops: int = 2
    n_newcomers: int = 5
    decode_s: float = 20.0
    passes: int = 3
    tries: int = TRIES

    @property
    def n_ctx(self) -> int:
        """Context that a slot needs."""
        loop = self.n_head + self.n_calls * (self.n_thought + self.n_result + 100)
        return 1024 + max(2 * loop, self.n_endless + self.n_prompt)


SMALL = EarlyPlan(60, 2, 60, 60, 20, 30, 2500, 1, 1, 1.0, 1, 1)


def with_template(stage: Sandbox) -> Sandbox:
    """The stage with a copy of its model that strips reasoning."""
    folder = stage.folder / "model"
    shutil.copytree(stage.model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return structs.replace(stage, model=str(folder))


async def run(stage: Sandbox, plan: EarlyPlan) -> Results:
    """Both services live side by side and are called by turns."""
    n_slots = plan.n_loops + DECODERS + plan.n_newcomers
    slots = SlotSpec(count=n_slots, n_ctx=plan.n_ctx)
    async with AsyncExitStack() as stack:
        callers = {}
        for name in (AUTO, OFF):
            spec = PrefixCacheSpec(anticipate=Anticipation(name))
            server = await stack.enter_async_context(service(stage, name, slots, spec))
            callers[name] = await stack.enter_async_context(TimedClient(server))
        yard = await callers[OFF].yardstick()
        by_service: dict[str, Figures] = {}
        numbers = count()
        shares = []

        async def scene(name: str, of: Scene) -> None:
            figures = by_service.setdefault(name, {})
            stage.say(f"next turns begun early: {name},{of.__name__.replace('_', ' ')}")
            values, share = await undisturbed(
                lambda: of(callers[name], plan, yard, next(numbers), is_early=name == AUTO),
                plan.tries,
            )
            shares.append(share)
            for name_of_figure, samples in values.items():
                figures[name_of_figure] = (*figures.get(name_of_figure, ()), *samples)

        for i in range(plan.passes):
            for of in (_pause, _others):
                for name in (AUTO, OFF) if i % 2 == 0 else (OFF, AUTO):
                    await scene(name, of)
    return _results(by_service, told(shares))


def _loop(plan: EarlyPlan, yard: Yardstick, seed: str, n_thought: int) -> Body:
    """A tool loop as its client sends it, with the reasoning."""
    random = Random(f"loop {seed}")
    thoughts = Random(f"thoughts {seed}")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(random, plan.n_head, yard)},
        {"role": "user", "content": text(random, plan.n_new, yard)},
    ]
    for i in range(plan.n_calls):
        function = {"name": "read_file", "arguments": f'{{"path": "file {i}"}}'}
        call = {"id": f"call_{i}", "type": "function", "function": function}
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if n_thought:
            answer["reasoning_content"] = text(thoughts, n_thought, yard)
        result = text(random, plan.n_result, yard)
        messages += [answer, {"role": "tool", "tool_call_id": f"call_{i}", "content": result}]
    return {"messages": messages, "tools": [tool(Random("read"))], **ANSWER}


def _asked(body: Body, answer: str, n_new: int, yard: Yardstick, seed: str) -> Body:
    words = text(Random(f"asked {seed}"), n_new, yard)
    new = ({"role": "assistant", "content": answer}, {"role": "user", "content": words})
    return {**body, "messages": [*body["messages"], *new]}


async def _pause(
    caller: TimedClient, plan: EarlyPlan, yard: Yardstick, number: int, *, is_early: bool
) -> Figures:
    """Next user turn after a tool loop and pause."""
    figures: Figures = {}
    for thinking, n_thought in (("reasoning", plan.n_thought), ("no reasoning", 0)):
        seed = f"{number} {thinking}"
        body = _loop(plan, yard, seed, n_thought)
        first = await caller.request(body, 16)
        if n_thought and is_early:
            await _until_begun(caller, await _n_begun(caller))
        later = await caller.request(_asked(body, first.text, plan.n_new, yard, seed), 16)
        figures |= {
            f"{thinking}: ttft": (later.ttft_s,),
            f"{thinking}: computed": (float(later.n_computed),),
            f"{thinking}: begun": (float(later.n_begun),),
            f"{thinking}: used": (float(later.n_used),),
        }
    return figures


async def _others(
    caller: TimedClient, plan: EarlyPlan, yard: Yardstick, number: int, *, is_early: bool
) -> Figures:
    """Decoding agents and newcomers, beside early turns of other agents."""
    enough = asyncio.Event()
    bodies = [question(plan.n_prompt, yard, f"decoder {number} {i}") for i in range(DECODERS)]
    tasks = [asyncio.create_task(caller.request(body, plan.n_endless, enough)) for body in bodies]
    loops = [_loop(plan, yard, f"beside {number} {i}", plan.n_thought) for i in range(plan.n_loops)]
    answers = await asyncio.gather(*(caller.request(body, 16) for body in loops))
    await asyncio.sleep(CALM_S)
    began = caller.clock()
    n_before = await _n_begun(caller)
    await asyncio.sleep(plan.decode_s)
    if is_early:
        await _until_begun(caller, n_before, is_whole=False)
    ended = caller.clock()
    n_after = await _n_begun(caller)
    newcomers = [
        await caller.request(question(plan.n_prompt, yard, f"newcomer {number} {i}"), 4)
        for i in range(plan.n_newcomers)
    ]
    enough.set()
    gaps = [
        gap for request in await asyncio.gather(*tasks) for gap in request.gaps_within(began, ended)
    ]
    if not gaps:
        raise Broken("the decoders had ended before the next turns were begun; let them go on")
    await _until_begun(caller, -1)
    for body, answer in zip(loops, answers, strict=True):
        # An agent that never comes back would teach the service to begin no turn early.
        await caller.request(_asked(body, answer.text, plan.n_new, yard, f"back {number}"), 16)
    return {
        "gaps": tuple(gaps),
        "newcomer": tuple(request.ttft_s for request in newcomers),
        "begun beside": (n_after - n_before,),
    }


async def _until_begun(caller: TimedClient, n_before: float, *, is_whole: bool = True) -> None:
    """Wait until early prefill is done. Raises Broken without any."""
    deadline = caller.clock() + WAIT_S
    while caller.clock() < deadline:
        slots = await caller.get("/slots")
        n_left = sum(slot["n_early_left"] for slot in slots)
        has_more = sum(slot["n_early"] for slot in slots) > n_before
        if has_more and not (is_whole and n_left):
            return
        await asyncio.sleep(POLL_S)
    raise Broken("no next turn was begun early: is this computer on battery, or out of memory?")


async def _n_begun(caller: TimedClient) -> float:
    return float(sum(slot["n_early"] for slot in await caller.get("/slots")))


def _results(by_service: dict[str, Figures], disturbance: str) -> Results:
    auto = by_service[AUTO]
    off = by_service[OFF]
    rows = tuple(
        (
            f"{thinking}, begun early: {name}",
            lasting(figures[f"{thinking}: ttft"]),
            _tokens(figures[f"{thinking}: computed"]),
            _tokens(figures[f"{thinking}: begun"]),
            _tokens(figures[f"{thinking}: used"]),
        )
        for thinking in ("reasoning", "no reasoning")
        for name, figures in by_service.items()
    )
    beside = tuple(
        (
            name,
            _tokens(figures["begun beside"]),
            lasting((percentile(figures["gaps"], 99),)),
            lasting(figures["newcomer"]),
        )
        for name, figures in by_service.items()
    )
    saved = spread(
        [
            a - b
            for a, b in zip(*(figures["reasoning: ttft"] for figures in (off, auto)), strict=True)
        ]
    )
    note = f"Seconds saved of a turn's TTFT, by the median: {saved.median:.2f}."
    heads = ("Turn after a pause", "TTFT", "Computed", "Begun early", "Used")
    tables = (
        ReportTable("The user's next turn after a tool loop", heads, rows, note),
        ReportTable(
            "Three agents decode beside agents in a pause",
            ("Begun early", "Tokens", "p99 gap", "Newcomer's TTFT"),
            beside,
            disturbance,
        ),
    )
    raw = {
        f"{who}: {figure}": v
        for who, figures in by_service.items()
        for figure, v in figures.items()
    }
    return Results(tables, _targets(auto, off), raw)


def _targets(auto: Figures, off: Figures) -> tuple[BenchTarget, ...]:
    def median(figures: Figures, figure: str) -> float:
        return spread(figures[figure]).median

    ttft = "reasoning: ttft"
    used = ratio(sum(auto["reasoning: used"]), sum(auto["reasoning: begun"]))
    gap = ratio(percentile(auto["gaps"], 99), percentile(off["gaps"], 99))
    newcomer = ratio(median(auto, "newcomer"), median(off, "newcomer"))
    alike = ratio(median(auto, ttft), median(auto, f"no {ttft}"))
    return (
        at_most("TTFT after a pause, against no reasoning", alike, 1.2),
        at_most(
            "TTFT after a pause, against off", ratio(median(auto, ttft), median(off, ttft)), 1.0
        ),
        at_least("used of what was begun", used, 0.8),
        at_most("p99 gap of decoding agents, against off", gap, 1.05),
        at_most("a newcomer's TTFT, against off", newcomer, 1.05),
    )


def _tokens(values: tuple[float, ...]) -> str:
    return f"{spread(values).median:,.0f}"
