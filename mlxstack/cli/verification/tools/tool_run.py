"""`verify --tools`: a service, its calls and repairs within a time limit."""

import asyncio
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.environment import Conditions, child_env, conditions, ended
from mlxstack.bench.servers import (
    Sandbox,
    ServerUnderTest,
    find_vllm_mlx,
    mlx_lm_server,
    serve,
    vllm_mlx,
)
from mlxstack.cli.verification.probe import Say, chat_model
from mlxstack.cli.verification.tools.call_check import CallCheck, CallOutcome, check
from mlxstack.cli.verification.tools.call_tasks import (
    N_OF_KIND,
    QUICK,
    CallKind,
    CallSizes,
    CallTask,
    call_tasks,
)
from mlxstack.cli.verification.tools.chat_server import ChatServer, OutOfTime, first_model
from mlxstack.cli.verification.tools.comparison import RepairComparison, first_difference
from mlxstack.cli.verification.tools.kept_results import keep, kept
from mlxstack.cli.verification.tools.repair_agent import RepairResult, repair
from mlxstack.cli.verification.tools.repair_tasks import REPAIRS, RepairTask
from mlxstack.cli.verification.tools.tool_report import (
    TemplateLosses,
    ToolReport,
    better_model,
    kind_results,
)
from mlxstack.cli.verification.tools.work_estimate import estimate_s, measured_rates
from mlxstack.core.errors import Broken, SetupError, StackError
from mlxstack.core.formatting import span
from mlxstack.core.preset import Preset
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.planner.fit import refuse_if_too_big
from mlxstack.planner.memory_room import room_in

N_AT_ONCE = 8
"""Requests at a time; fewer where the preset has fewer slots."""
N_CTX = 16_384
"""Tokens of a slot: the longest request writes 200 lines of code."""
MARGIN = 3.0
"""The limit of time in estimates."""
MIN_LIMIT_S = 120.0
MLX_LM = "mlx_lm"
VLLM_MLX = "vllm-mlx"

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]
"""Called with a title, the number done, and the number of all."""


class ToolPlan(Struct, frozen=True):
    """Requests, repairs and time of a run."""

    is_quick: bool = False
    n_repairs: int = 0
    """Repairs, of ten."""
    against: tuple[str, ...] = ()
    """Other servers for the repairs: an address, `mlx_lm` or `vllm-mlx`."""
    limit_s: float | None = None
    """Seconds for the requests; None for three times what they are expected to take."""
    n_of_kind: int = N_OF_KIND
    """Requests of each kind, of ten."""

    @property
    def sizes(self) -> CallSizes:
        """Sizes of the long requests."""
        return QUICK if self.is_quick else CallSizes()

    @property
    def tasks(self) -> list[CallTask]:
        """The requests."""
        counts: Counter[CallKind] = Counter()
        tasks = []
        for task in call_tasks(self.sizes):
            counts[task.kind] += 1
            if counts[task.kind] <= self.n_of_kind:
                tasks.append(task)
        return tasks


class ToolRun(Struct, frozen=True):
    """Requests to one server at a time, all before one deadline."""

    plan: ToolPlan
    n_at_once: int
    progress: Progress

    def calls(self, server: ChatServer, tasks: Sequence[CallTask]) -> list[CallCheck]:
        """Check of each request, in their order."""
        return self._each("calls", partial(_checked, server), tasks)

    def repairs(self, server: ChatServer, title: str = "repairs") -> list[RepairResult]:
        """Result of each repair, in their order."""
        tasks: Sequence[RepairTask] = REPAIRS[: self.plan.n_repairs]
        return self._each(title, partial(repair, server), tasks)

    def _each(
        self, title: str, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> list[Result]:
        results = []
        self.progress(title, 0, len(tasks))
        with ThreadPoolExecutor(self.n_at_once) as pool:
            for result in pool.map(work, tasks):
                results.append(result)
                self.progress(title, len(results), len(tasks))
        return results


def _checked(server: ChatServer, task: CallTask) -> CallCheck:
    try:
        answer = server.ask(task.messages, task.tools, task.max_tokens)
    except OutOfTime:
        return CallCheck(task.kind, CallOutcome.NOT_MADE)
    except Broken as error:
        return CallCheck(task.kind, CallOutcome.FAILED, error.message)
    return check(task, answer)


def tool_report(
    name: str, home: Home, env: Mapping[str, str], say: Say, progress: Progress, plan: ToolPlan
) -> ToolReport:
    """Kept report on the tool calls of a preset or a model.

    Raises StackError.
    """
    budget = this_memory(env)
    candidate = chat_model(name, home, budget)
    model = candidate.preset.model.id
    preset = _preset(candidate.preset)
    refuse_if_too_big(replace(candidate, preset=preset), room_in(home, budget))
    about = conditions(model, datetime.now(UTC).date(), env)
    losses = template_losses(preset)
    run = ToolRun(plan, preset.slots.count, progress)
    with tempfile.TemporaryDirectory(prefix="mlx-stack-tools-") as folder:
        stage = Sandbox(Path(folder), child_env(env), model, say)
        report = asyncio.run(_report(run, stage, preset, about, losses))
    report = replace(report, conditions=ended(about))
    report = replace(report, better=better_model(report, kept(home, ToolReport)))
    keep(home, model, report)
    return report


def _preset(preset: Preset) -> Preset:
    """Preset with slots for short requests, without keys."""
    slots = replace(
        preset.slots, count=N_AT_ONCE, n_ctx=min(preset.slots.n_ctx, N_CTX), save_path=None
    )
    return replace(preset, slots=slots)


def template_losses(preset: Preset) -> TemplateLosses:
    """Losses of a preset's chat template. Raises SetupError without one."""
    from mlxstack.engine.loading.loader import locate
    from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
    from mlxstack.text.assembly import template_tool_losses

    tokenizer = load_tokenizer(locate(preset.model))
    if not tokenizer.has_chat_template:
        raise SetupError(f"`{preset.name}` has no chat template, and so no tool calls")
    by_template, in_prompt = template_tool_losses(tokenizer)
    digest = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
    return TemplateLosses(digest, by_template, in_prompt)


async def _report(
    run: ToolRun, stage: Sandbox, preset: Preset, about: Conditions, losses: TemplateLosses
) -> ToolReport:
    stage.say("loading the model")
    async with serve(preset, stage.folder / "home", stage.env) as server:
        report = await asyncio.to_thread(_own_report, run, stage, preset, server, about, losses)
    # One server at a time: two models may not fit.
    comparisons = []
    for name in run.plan.against:
        stage.say(f"repairs of {name}")
        try:
            async with AsyncExitStack() as stack:
                rival = await _rival(stack, stage, name)
                comparisons.append(await asyncio.to_thread(_comparison, run, rival, report))
        except StackError as error:
            # What was measured so far is kept.
            comparisons.append(RepairComparison(name, (), (), error.message))
    return replace(report, against=tuple(comparisons))


def _own_report(
    run: ToolRun,
    stage: Sandbox,
    preset: Preset,
    under_test: ServerUnderTest,
    about: Conditions,
    losses: TemplateLosses,
) -> ToolReport:
    tasks = run.plan.tasks
    began = time.monotonic()
    with ChatServer(under_test.url, under_test.model) as server:
        rates = measured_rates(server, tasks, run.n_at_once)
        expected_s = estimate_s(rates, tasks, run.plan.n_repairs)
        limit_s = run.plan.limit_s or max(MIN_LIMIT_S, MARGIN * expected_s)
        server.deadline = time.monotonic() + limit_s
        stage.say(f"about {span(expected_s)}; ends after {span(limit_s)} at the latest")
        checks = run.calls(server, tasks)
        repairs = run.repairs(server) if run.plan.n_repairs else []
    kinds = kind_results(checks, losses.by_template)
    report = ToolReport(
        preset=preset.name,
        model=preset.model.id,
        conditions=about,
        seconds=time.monotonic() - began,
        estimate_s=expected_s,
        limit_s=limit_s,
        is_quick=run.plan.is_quick,
        n_calls=sum(kind.n for kind in kinds),
        n_valid=sum(kind.n_valid for kind in kinds),
        n_exact=sum(kind.n_exact for kind in kinds),
        n_loops=sum(kind.n_loops for kind in kinds),
        n_left_out=sum(check.outcome is CallOutcome.NOT_MADE for check in checks),
        template=losses,
        kinds=kinds,
        checks=tuple(checks),
        repairs=tuple(repairs),
    )
    return replace(report, is_sound=report.n_calls > 0 and not report.losers)


def _comparison(run: ToolRun, rival: ServerUnderTest, report: ToolReport) -> RepairComparison:
    deadline = time.monotonic() + report.limit_s
    with ChatServer(rival.url, rival.model, deadline) as server:
        theirs = run.repairs(server, f"repairs of {rival.name}")
    differences = map(first_difference, report.repairs, theirs)
    return RepairComparison(rival.name, tuple(theirs), tuple(filter(None, differences)))


async def _rival(stack: AsyncExitStack, stage: Sandbox, name: str) -> ServerUnderTest:
    """Another server of the model, started or addressed. Raises StackError."""
    if name == MLX_LM:
        return await stack.enter_async_context(mlx_lm_server(stage))
    if name == VLLM_MLX:
        program = find_vllm_mlx(stage)
        if program is None:
            raise SetupError("vllm-mlx is not on the PATH; install it with pipx, or leave it out")
        return await stack.enter_async_context(vllm_mlx(stage, program))
    return ServerUnderTest(name, name, await asyncio.to_thread(first_model, name))
