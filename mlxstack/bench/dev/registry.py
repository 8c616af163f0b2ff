"""Registry of benchmarks: from a request to a report."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import date
from pathlib import Path

import uvloop
from msgspec import Struct, structs
from msgspec.structs import replace

from mlxstack.bench.dev import (
    cli_startup,
    drafts,
    early_turns,
    engine,
    gateway,
    peers,
    person_first,
    prefix_cache_report,
    prefix_cache_scenarios,
    serving_report,
    serving_scenarios,
    tokenization,
    tui_overhead,
)
from mlxstack.bench.dev.in_process_trials import with_model
from mlxstack.bench.dev.simulation import scenario
from mlxstack.bench.dev.timed_request import TimedClient
from mlxstack.bench.dev.trials import BuildModel
from mlxstack.bench.dev.workload import RealText, real_text
from mlxstack.bench.environment import child_env, conditions, ended
from mlxstack.bench.report import BenchReport, Results
from mlxstack.bench.servers import Sandbox, ServerUnderTest, service
from mlxstack.core.preset import PrefillSpec, SlotSpec

SYNTHETIC = frozenset({"random", "demo"})
"""Models that know no real text."""
FULL = BuildModel("", 8, 512)
SMALL = BuildModel("", 2, 128)


class BenchRequest(Struct, frozen=True):
    """`model` is "random", "demo", a folder or a hub id.

    `is_small` takes a tiny model and short prompts: to see that all works, not how fast. `serve`
    calls `own` instead of a service started for it, and `peer` beside it; it plays `scenes` only,
    all if there are none.
    """

    model: str = "random"
    passes: int = 3
    max_tokens: int | None = None
    is_small: bool = False
    own: ServerUnderTest | None = None
    peer: ServerUnderTest | None = None
    scenes: tuple[str, ...] = ()
    scenario: Path | None = None
    """File of the scenario that `simulate` plays."""
    draft: str | None = None
    """Draft model or drafter of the model, for `drafts` on real text."""


class BenchContext(Struct, frozen=True):
    """Context: scratch `folder`, `command` line, progress function `say`."""

    folder: Path
    env: Mapping[str, str]
    day: date
    command: str
    say: Callable[[str], None]


def report(name: str, request: BenchRequest, inputs: BenchContext) -> BenchReport:
    """Run one benchmark. Raises Broken for a failed start or measurement."""
    folder = inputs.folder / name
    folder.mkdir(parents=True)
    build = replace(SMALL if request.is_small else FULL, folder=str(inputs.folder / "model"))
    stage = Sandbox(folder, child_env(inputs.env), "", inputs.say)
    model = "none" if name in WITHOUT_MODEL else _model_words(request, build)
    before = conditions(model, inputs.day, inputs.env)
    if request.own is None and name not in WITHOUT_MODEL:
        stage = with_model(stage, request.model, build)
    results = BENCHES[name](stage, request)
    return BenchReport(
        name=f"bench dev {name}",
        command=inputs.command,
        conditions=ended(before),
        **structs.asdict(results),
    )


def _model_words(request: BenchRequest, build: BuildModel) -> str:
    if request.own is not None:
        return f"{request.own.model} at {request.own.url}"
    if request.model != "random":
        return request.model
    return f"a random Llama, {build.n_layers} layers of width {build.width}, float32"


def _engine(stage: Sandbox, request: BenchRequest) -> Results:
    plan = engine.SMALL if request.is_small else engine.EnginePlan()
    return engine.run(stage, replace(plan, passes=request.passes))


def _drafts(stage: Sandbox, request: BenchRequest) -> Results:
    plan = drafts.SMALL if request.is_small else drafts.DraftsPlan()
    plan = replace(plan, passes=request.passes)
    if _real_text(request) is None:
        return drafts.run(stage, plan)
    return drafts.run_on_text(stage, replace(drafts.on_real_text(plan), draft=request.draft))


def _early(stage: Sandbox, request: BenchRequest) -> Results:
    plan = early_turns.SMALL if request.is_small else early_turns.EarlyPlan()
    if request.model == "random":
        stage = early_turns.with_template(stage)
    return uvloop.run(early_turns.run(stage, replace(plan, passes=request.passes)))


def _text(stage: Sandbox, request: BenchRequest) -> Results:
    plan = tokenization.SMALL if request.is_small else tokenization.TextPlan()
    return tokenization.run(stage, replace(plan, passes=request.passes))


def _start(stage: Sandbox, request: BenchRequest) -> Results:
    return cli_startup.run(
        stage, cli_startup.SMALL if request.is_small else cli_startup.StartPlan(5 * request.passes)
    )


def _cache(stage: Sandbox, request: BenchRequest) -> Results:
    plan = prefix_cache_scenarios.SMALL if request.is_small else prefix_cache_scenarios.CachePlan()
    return uvloop.run(prefix_cache_report.run(stage, replace(plan, passes=request.passes)))


def _tui(stage: Sandbox, request: BenchRequest) -> Results:
    plan = tui_overhead.SMALL if request.is_small else tui_overhead.WatchPlan()
    return uvloop.run(tui_overhead.run(stage, replace(plan, passes=request.passes)))


def _gateway(stage: Sandbox, request: BenchRequest) -> Results:
    plan = gateway.SMALL if request.is_small else gateway.GatewayBenchPlan()
    return uvloop.run(gateway.run(stage, replace(plan, passes=request.passes)))


def _person(stage: Sandbox, request: BenchRequest) -> Results:
    plan = person_first.SMALL if request.is_small else person_first.PersonPlan()
    return uvloop.run(person_first.run(stage, replace(plan, passes=request.passes)))


def _serve(stage: Sandbox, request: BenchRequest) -> Results:
    return uvloop.run(_served(stage, _serve_plan(request), request))


def _peers(stage: Sandbox, request: BenchRequest) -> Results:
    return uvloop.run(peers.run(stage, _serve_plan(request)))


def _serve_plan(request: BenchRequest) -> serving_scenarios.ServePlan:
    plan = serving_scenarios.SMALL if request.is_small else serving_scenarios.ServePlan()
    scenes = serving_scenarios.played(request.scenes or plan.scenes)
    answer = request.max_tokens or plan.n_answer
    plan = replace(plan, passes=request.passes, n_answer=answer, scenes=scenes)
    real = _real_text(request)
    if real is None:
        return plan
    return serving_scenarios.on_real_text(plan, real)


def _real_text(request: BenchRequest) -> RealText | None:
    """Real text in the tokens of a wanted model folder."""
    folder = Path(request.model)
    is_real = request.own is None and request.model not in SYNTHETIC and folder.is_dir()
    return real_text(folder) if is_real else None


async def _served(
    stage: Sandbox, plan: serving_scenarios.ServePlan, request: BenchRequest
) -> Results:
    async with AsyncExitStack() as stack:
        own = request.own
        if own is None:
            slots = SlotSpec(count=plan.n_slots, n_ctx=plan.n_ctx)
            own = await stack.enter_async_context(service(stage, "serve", slots))
        servers = (own, request.peer) if request.peer else (own,)
        callers = [await stack.enter_async_context(TimedClient(server)) for server in servers]
        by_server = await serving_scenarios.play(stage, callers, plan)
    return serving_report.results(
        by_server, plan, serving_report.SilenceBounds(PrefillSpec().max_stall_ms / 1000)
    )


def _simulate(_: Sandbox, request: BenchRequest) -> Results:
    file = request.scenario
    return scenario.run(scenario.read_scenario(file) if file else scenario.Scenario())


BENCHES: dict[str, Callable[[Sandbox, BenchRequest], Results]] = {
    "engine": _engine,
    "drafts": _drafts,
    "early": _early,
    "cache": _cache,
    "text": _text,
    "serve": _serve,
    "peers": _peers,
    "start": _start,
    "tui": _tui,
    "gateway": _gateway,
    "person": _person,
    "simulate": _simulate,
}
WITHOUT_MODEL = frozenset({"start", "simulate"})
EVERYTHING = ("start", "engine", "drafts", "early", "cache", "text", "tui", "gateway", "peers")
"""Benchmarks of `all`; the scenes of `serve` are in `peers`."""
