"""`plan` and `spec`: capacity from config.json alone, before a download."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.start_choice import Set
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxstack.host.hardware import MemoryBudget
    from mlxstack.host.home import Home
    from mlxstack.planner.candidate import Candidate

MAX_MACHINES = 64
CHANGES = {
    "a model": {"--memory", "--hosts", "--ctx", "--agents", "--set"},
    "the ranking": {"--memory", "--ctx", "--agents", "--all"},
    "--table": {"--ctx"},
}
"""Options that change the output of each form of `plan`."""

ModelArgument = Annotated[
    str | None, preset_argument("What to plan for; left out: the presets that fit.", "MODEL")
]


MemoryOption = Annotated[
    str | None,
    typer.Option(help="Of a Mac with so much memory, such as 24GB; a bare number means GB."),
]
MachinesOption = Annotated[
    str | None, typer.Option(metavar="NxMEMORY", help="Of one model on N Macs, such as 2x64GB.")
]
ContextsOption = Annotated[
    list[str] | None, typer.Option(help="Tokens per agent, such as 32k; may be repeated.")
]
AgentsOption = Annotated[
    int | None, typer.Option("--agents", "--slots", min=1, help="Agents at the same time.")
]


def plan(  # noqa: PLR0913, PLR0917 - each is an option that a person types
    context: typer.Context,
    model: ModelArgument = None,
    memory: MemoryOption = None,
    hosts: MachinesOption = None,
    ctx: ContextsOption = None,
    agents: AgentsOption = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also the presets that do not fit.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="KV of every preset.")] = False,
    sets: Set = None,
    simulate: Annotated[bool, typer.Option("--simulate", hidden=True)] = False,
    scenario: Annotated[str | None, typer.Option(hidden=True)] = None,
    speeds_of: Annotated[str | None, typer.Option(hidden=True)] = None,
    recommend: Annotated[bool, typer.Option("--recommend", hidden=True)] = False,
) -> VerbResult:
    """Show the presets that fit this machine, or what a model needs.

    Without a model: presets for coding agents, best first, for 3 agents of 64k tokens each.
    """
    from mlxstack.cli.units import tokens_of
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    contexts = [tokens_of(text) for text in ctx or ()]
    if recommend:
        raise Misuse("`plan --recommend` is now `mlx-stack plan`; leave out --recommend")
    if simulate or scenario or speeds_of:
        raise Misuse("`plan` simulates no more; see `mlx-stack bench dev simulate --scenario FILE`")
    _refuse_idle(_form(model, table), context)
    if hosts is not None and memory:
        raise Misuse("--hosts names the memory of each machine; leave out --memory")
    if hosts is not None:
        memory, sets = _machines(hosts, sets)
    budget = _memory(memory)
    if model is not None:
        return _forecast(_candidate(model, budget, sets), budget, agents, contexts)
    if table:
        return _table(home, contexts)
    return _ranking(home, budget, agents, contexts, show_all)


def spec(model: Annotated[str, preset_argument("Whose geometry to print.", "MODEL")]) -> VerbResult:
    """Print the KV geometry of a model: layers, bytes per token."""
    from mlxstack.cli.plan_tables import show_spec
    from mlxstack.planner.estimate import spec_of

    model_spec = spec_of(_candidate(model, _memory(None), None))
    return VerbResult(model_spec, lambda: show_spec(model_spec))


def _form(model: str | None, is_table: bool) -> str:
    """Form of `plan`, a key of `CHANGES`. Raises Misuse."""
    if is_table and model is not None:
        raise Misuse("--table shows every preset; leave out the model")
    if is_table:
        return "--table"
    if model is None:
        return "the ranking"
    return "a model"


def _refuse_idle(form: str, context: typer.Context) -> None:
    """Raise Misuse for a given option that changes nothing in this form."""
    for option in context.command.params:
        name = option.opts[0]
        forms = [kind for kind in CHANGES if name in CHANGES[kind]]
        if forms and form not in forms and context.params[option.name or ""]:
            raise Misuse(f"{name} changes nothing in {form}; it goes with {' or '.join(forms)}")


def _memory(text: str | None) -> "MemoryBudget":
    """Memory of a Mac with `text`, or of this machine. Raises Misuse."""
    from mlxstack.core.errors import SetupError
    from mlxstack.host.hardware import mac_memory, this_memory

    if text is None:
        return this_memory(os.environ)
    try:
        return mac_memory(text)
    except SetupError as error:
        raise Misuse(f"--memory: {error.message}") from error


def _machines(text: str, sets: list[str] | None) -> tuple[str, list[str]]:
    """Memory of each machine of `2x64GB`, and settings with names for all. Raises Misuse."""
    count, _, memory = text.partition("x")
    if not count.isdigit() or not 2 <= int(count) <= MAX_MACHINES or not memory:
        raise Misuse(f"--hosts {text}: write it as number x memory of each, such as 2x64GB")
    names = ",".join(f"mac-{n}" for n in range(int(count)))
    return memory, [*(sets or ()), f"hosts=[{names}]"]


def _candidate(model: str, memory: "MemoryBudget", sets: list[str] | None) -> "Candidate":
    from mlxstack.host.home import home_from
    from mlxstack.planner.derived_preset import candidate_for

    return candidate_for(model, home_from(os.environ), memory, tuple(sets or ()))


def _forecast(
    candidate: "Candidate", budget: "MemoryBudget", agents: int | None, contexts: list[int]
) -> VerbResult:
    from msgspec.structs import replace

    from mlxstack.cli.plan_tables import show_forecast
    from mlxstack.core.preset import ServiceKind
    from mlxstack.host.hardware import this_memory
    from mlxstack.host.home import home_from
    from mlxstack.planner.estimate import CONTEXTS, forecast
    from mlxstack.planner.memory_room import claims_in

    if candidate.preset.kind is ServiceKind.EMBEDDING and agents is not None:
        raise Misuse(
            f"{candidate.preset.name} is an embedding model, which has no slots; leave out --agents"
        )
    load = candidate.load(budget)
    target_load = replace(
        load, n_slots=agents or load.n_slots, n_ctx=max(contexts, default=load.n_ctx)
    )
    # An imagined machine runs nothing else.
    is_here = budget == this_memory(os.environ)
    claims = claims_in(home_from(os.environ), budget, candidate.preset.name) if is_here else ()
    result = forecast(candidate, budget, target_load, contexts or CONTEXTS, claims)
    return VerbResult(result, lambda: show_forecast(result))


def _ranking(
    home: "Home", budget: "MemoryBudget", agents: int | None, contexts: list[int], shows_all: bool
) -> VerbResult:
    from mlxstack.cli.plan_tables import show_ranking
    from mlxstack.planner.candidate import with_shapes
    from mlxstack.planner.ranking import N_AGENTS, agent_candidates, ranked
    from mlxstack.policy.memory.capacity_advice import AGENT_TOKENS

    if len(contexts) > 1:
        raise Misuse("the ranking is for one context; give --ctx once")
    n_agents = agents or N_AGENTS
    n_ctx = max(contexts, default=AGENT_TOKENS)
    candidates = agent_candidates(home)
    rows = ranked(with_shapes(candidates), budget, n_agents, n_ctx)
    refusals = _refusals(candidates)
    report = {
        "n_agents": n_agents,
        "n_ctx": n_ctx,
        "memory": budget,
        "presets": rows,
        "refusals": refusals,
    }

    def show() -> None:
        show_ranking(rows, budget, n_agents, n_ctx, shows_all)
        _note(refusals)

    return VerbResult(report, show)


def _table(home: "Home", contexts: list[int]) -> VerbResult:
    from mlxstack.cli.plan_tables import show_table, table_rows
    from mlxstack.planner.candidate import shipped, with_shapes

    candidates = shipped(home)
    rows = table_rows(with_shapes(candidates), contexts or [4096])
    refusals = _refusals(candidates)

    def show() -> None:
        show_table(rows)
        _note(refusals)

    return VerbResult({"models": rows, "refusals": refusals}, show)


def _refusals(candidates: "Sequence[Candidate]") -> dict[str, str]:
    """Why models of presets cannot be built here."""
    return {
        candidate.preset.name: candidate.reply.refusal
        for candidate in candidates
        if candidate.reply.refusal
    }


def _note(refusals: dict[str, str]) -> None:
    from mlxstack.cli.output import note

    for name, refusal in refusals.items():
        note(f"{name}: {refusal}", is_dim=True)
