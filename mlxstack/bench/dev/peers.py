"""`bench dev peers`: our service, other servers, the bare engine."""

import asyncio
from contextlib import AsyncExitStack

from mlxstack.bench.dev.in_process_trials import measure
from mlxstack.bench.dev.serving_report import SilenceBounds, median, results
from mlxstack.bench.dev.serving_scenarios import Figures, ServePlan, play
from mlxstack.bench.dev.taken_path import check_path
from mlxstack.bench.dev.timed_request import TimedClient
from mlxstack.bench.dev.trials import BatchAnswers, SingleFloor, Steps
from mlxstack.bench.report import BenchTarget, ReportTable, Results, at_least, at_most
from mlxstack.bench.servers import Sandbox, find_vllm_mlx, mlx_lm_server, service, vllm_mlx
from mlxstack.bench.statistics import ratio, times
from mlxstack.core.preset import SlotSpec

OURS = "mlx-stack"
PEER = "mlx_lm.server"
NEWCOMERS = 4
"""Agents that arrive together, of whom the last waits longest for its first token."""


async def run(stage: Sandbox, plan: ServePlan) -> Results:
    """Run all servers by turns, each floor after its scene."""
    floors: Figures = {}

    async def after(scene: str, by_server: dict[str, Figures]) -> None:
        for name, (trial, who, quantity) in _floors(scene, by_server[OURS], plan).items():
            stage.say(f"{name}, in process")
            (measured,) = await asyncio.to_thread(measure, stage, [trial])
            floors[name] = (*floors.get(name, ()), *measured.of(who, quantity))

    async with AsyncExitStack() as stack:
        slots = SlotSpec(count=plan.n_slots, n_ctx=plan.n_ctx)
        servers = [
            await stack.enter_async_context(service(stage, "peers", slots)),
            await stack.enter_async_context(mlx_lm_server(stage)),
        ]
        if (command := find_vllm_mlx(stage)) is not None:
            servers.append(await stack.enter_async_context(vllm_mlx(stage, command)))
        callers = [await stack.enter_async_context(TimedClient(server)) for server in servers]
        by_server = await play(stage, callers, plan, after)
    check_path(by_server[OURS], plan.scenes)
    report = results(by_server, plan, SilenceBounds())
    raw = {**report.raw, **{f"floor: {name}": values for name, values in floors.items()}}
    targets = (*report.targets, *_targets(by_server, plan, floors))
    ratios = [_ratios(by_server, plan, peer) for peer in by_server if peer != OURS]
    return Results((*report.tables, *ratios), targets, raw, report.charts)


def _floors(
    scene: str, ours: Figures, plan: ServePlan
) -> dict[str, tuple[SingleFloor | Steps | BatchAnswers, str, str]]:
    """Floors of one pass of a scene over equal token counts."""
    if scene == "turns":
        n_known = round(ours["n known"][-1])
        n_next = round(ours["n next turn"][-1])
        follow_up = SingleFloor(max(1, n_known - n_next), max(2, n_next), 1)
        repeat = SingleFloor(round(ours["n cold"][-1]) - 1, 1, 1)
        return {"next turn": (follow_up, "floor", "ttft_s"), "again": (repeat, "floor", "ttft_s")}
    if scene == "crowds":
        contexts = (plan.n_prompt + plan.n_answer // 2,) * plan.crowd[-1]
        return {
            "step": (Steps(contexts, passes=1), "theirs", "step_s"),
            "answers": (
                BatchAnswers(plan.crowd[-1], plan.n_prompt, plan.n_answer),
                "theirs",
                "step_s",
            ),
        }
    return {}


def _targets(
    by_server: dict[str, Figures], plan: ServePlan, floors: Figures
) -> tuple[BenchTarget, ...]:
    """Targets of the scenes; floors are compared pass by pass."""
    ours = by_server[OURS]
    peer = by_server[PEER]
    n = plan.crowd[-1]

    def of_peer(figure: str) -> float:
        return ratio(median(ours[figure]), median(peer[figure]))

    targets: list[BenchTarget] = []
    if "turns" in plan.scenes:

        def of_floor(figure: str) -> float:
            return median([ratio(*pair) for pair in zip(ours[figure], floors[figure], strict=True)])

        targets += [
            at_most(f"cold prompt's TTFT, against {PEER}", of_peer("cold"), 0.6),
            at_most(f"next turn's TTFT, against {PEER}", of_peer("next turn"), 1.0),
            at_most("next turn, against in process", of_floor("next turn"), 1.1),
            at_most("same prompt again, against in process", of_floor("again"), 1.3),
            at_most(f"a sibling's TTFT, against {PEER}", of_peer("sibling"), 1.0),
            at_most(f"a branch's TTFT, against {PEER}", of_peer("branch"), 1.0),
        ]
    if "crowds" in plan.scenes:
        targets += [
            at_least(f"decode of {size}, against {PEER}", of_peer(f"crowd {size}: decode"), 1.0)
            for size in plan.crowd
        ]
        last = NEWCOMERS if NEWCOMERS in plan.crowd else n
        title = f"TTFT of the last of {last} newcomers, against {PEER}"
        targets.append(at_most(title, of_peer(f"crowd {last}: last ttft"), 1.0))
        rates = ours[f"crowd {n}: decode"]
        against = {"steps of mlx-lm's batch": "step", "answers of its BatchGenerator": "answers"}
        targets += [
            at_least(
                f"decode of {n} agents, against {figure}",
                median(
                    [rate * step_s / n for rate, step_s in zip(rates, floors[name], strict=True)]
                ),
                0.95,
            )
            for figure, name in against.items()
        ]
    if "requests" in plan.scenes:
        rate = of_peer("requests per second")
        targets.append(at_least(f"requests per second, against {PEER}", rate, 2.0))
    if "team" in plan.scenes:
        targets += [
            at_most(f"team's first TTFT, against {PEER}", of_peer("team first ttft"), 0.30),
            at_most(f"team's turns at once, against {PEER}", of_peer("team at once"), 0.5),
        ]
    return tuple(targets)


def _ratios(by_server: dict[str, Figures], plan: ServePlan, name: str) -> ReportTable:
    ours = by_server[OURS]
    peer = by_server[name]
    figures = {
        "TTFT cold": "cold",
        "TTFT of the same prompt again": "again",
        "TTFT of the next turn": "next turn",
        "TTFT of a branch": "branch",
        "TTFT of a sibling": "sibling",
        "newcomer's TTFT beside decoders": "newcomer",
        "worst gap of decoders": "gaps joining",
        "team: TTFT of turn 1": "team first ttft",
        "team: TTFT of later turns": "team later ttft",
        "team: turns one by one": "team one by one",
        "team: turns at once": "team at once",
        **{f"last TTFT of {n} newcomers": f"crowd {n}: last ttft" for n in plan.crowd if n > 1},
        **{f"decode of {n} agents": f"crowd {n}: decode" for n in plan.crowd},
        "requests per second": "requests per second",
    }
    worst = {"gaps joining"}
    rows = tuple(
        (title, times(ratio(_of(ours, figure, worst), _of(peer, figure, worst))))
        for title, figure in figures.items()
        if figure in ours
    )
    note = "Less is better down to the newcomers, more is better from there on."
    return ReportTable(f"Ours against {name}", ("What", "Ours / theirs"), rows, note)


def _of(figures: Figures, figure: str, worst: set[str]) -> float:
    if figure in worst:
        return max(figures[figure], default=0.0)
    return median(figures[figure])
