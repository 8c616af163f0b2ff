"""Ranking of presets for coding agents on a machine."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import presets
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.formatting import size, tokens
from mlxstack.host.hardware import MemoryBudget, buffer_cache_limit
from mlxstack.host.home import Home
from mlxstack.models.model_files import find_model
from mlxstack.planner.candidate import Candidate, excerpts, of_many, shipped, with_shapes
from mlxstack.planner.fit import BUDGET_KEY, refuse_if_too_big, settings
from mlxstack.planner.memory_room import MemoryRoom
from mlxstack.policy.memory.capacity import ServiceLoad, fits, need
from mlxstack.policy.memory.capacity_advice import (
    AGENT_TOKENS,
    Advice,
    CapacityRequest,
    FitLevel,
    advise,
    nearest,
    option,
)

N_AGENTS = 3
"""Agents to plan for: a client with its sub-agents."""

RESERVE = 10
"""Percent of the memory for models that a recommended load leaves free."""

VERDICTS = {FitLevel.NOT_TRAINED: "not trained", FitLevel.TOO_LARGE: "too large"}

N_PROPOSED = 3
"""Presets that the refusal of another one names at most."""


class AdviceRow(Struct, frozen=True):
    """Ranked preset."""

    preset: str
    verdict: str
    n_bytes: int
    weights_bytes: int
    kv_bits: int
    max_agents: int
    options: tuple[str, ...]
    """Options of `up` for these agents."""
    command: str
    """Starts it with these agents; "" where it does not fit."""
    why: str


class PresetFit(Struct, frozen=True):
    """Weights, fit and presence of a preset's model; None where unknown."""

    weights_bytes: int | None
    fits: bool | None
    is_downloaded: bool
    modalities: str = "text"
    """By the files, or by config.json before the download."""
    refusal: str = ""
    """Reason why the model has no shape here."""


def preset_fit(candidate: Candidate, room: MemoryRoom) -> PresetFit:
    """Size and fit of a preset with its own settings."""
    modalities = "text"
    if candidate.vision.files is not None:
        modalities = "text, image"
    try:
        n_bytes = candidate.weights.n_bytes()
        refuse_if_too_big(candidate, room)
    except BadRequest:
        refusal = candidate.reply.refusal
        return PresetFit(None, None, candidate.is_measured, modalities, refusal)
    except SetupError:
        refusal = candidate.reply.refusal
        return PresetFit(n_bytes, False, candidate.is_measured, modalities, refusal)
    return PresetFit(n_bytes, True, candidate.is_measured, modalities)


def preset_fits(home: Home, names: Iterable[str], memory: MemoryBudget) -> dict[str, PresetFit]:
    """Fit of each readable preset on an otherwise idle machine."""
    models = {}
    for name in names:
        with suppress(SetupError, BadRequest):
            preset = presets.load(name, home).preset
            models[name] = preset, find_model(preset.model, excerpts())
    room = MemoryRoom(memory)
    candidates = of_many(list(models.values()))
    return {
        name: preset_fit(candidate, room)
        for name, candidate in zip(models, candidates, strict=True)
    }


def agent_presets(home: Home) -> list[Candidate]:
    """Chat presets with the models' shapes, without those derived from a served model."""
    return with_shapes(agent_candidates(home))


def agent_candidates(home: Home) -> list[Candidate]:
    """As `agent_presets`, with those whose models cannot be built here."""
    files = presets.listed(home)
    return [
        candidate
        for candidate in shipped(home)
        if files[candidate.preset.name].parent != home.derived_presets
    ]


def with_reserve(memory: MemoryBudget) -> MemoryBudget:
    """Memory less the share that is kept free.

    What a large Mac's limit leaves below its working set is part of that share.
    """
    whole = memory.usable
    if memory.working_set:
        whole = memory.working_set - buffer_cache_limit(memory.working_set)
    return replace(memory, usable=min(memory.usable, whole * (100 - RESERVE) // 100))


def recommendation(
    candidates: Sequence[Candidate], memory: MemoryBudget, n_agents: int, n_ctx: int
) -> tuple[Advice, ...]:
    """Candidates, best first, with the reserve kept free."""
    wishes = [
        CapacityRequest(
            candidate.preset.name, _wish(candidate, memory, n_agents, n_ctx), candidate.n_trained
        )
        for candidate in candidates
    ]
    return advise(wishes, with_reserve(memory).usable)


def ranked(
    candidates: Sequence[Candidate], memory: MemoryBudget, n_agents: int, n_ctx: int
) -> list[AdviceRow]:
    """The ranking with commands and reasons."""
    by_name = {candidate.preset.name: candidate for candidate in candidates}
    return [
        _row(by_name[advice.name], advice, with_reserve(memory))
        for advice in recommendation(candidates, memory, n_agents, n_ctx)
    ]


def proposal(home: Home, memory: MemoryBudget) -> str:
    """Line on the presets that fit `memory`, for agents or for one agent."""
    candidates = agent_presets(home)
    for n_agents in (N_AGENTS, 1):
        rows = ranked(candidates, memory, n_agents, AGENT_TOKENS)
        fitting = [row for row in rows if row.command][:N_PROPOSED]
        if fitting:
            load = f"{n_agents} x {tokens(AGENT_TOKENS)}"
            dense = (f", {row.kv_bits}-bit KV" if row.kv_bits < 16 else "" for row in fitting)
            names = (f"{row.preset} ({load}{kv})" for row, kv in zip(fitting, dense, strict=True))
            return f"presets that fit here: {', '.join(names)}; all: `mlx-stack plan`"
    return (
        f"no preset with {tokens(AGENT_TOKENS)} of context fits here; all: `mlx-stack plan --all`"
    )


def _wish(candidate: Candidate, memory: MemoryBudget, n_agents: int, n_ctx: int) -> ServiceLoad:
    slots = replace(candidate.preset.slots, count=n_agents, n_ctx=n_ctx)
    sized = replace(candidate, preset=replace(candidate.preset, slots=slots))
    load = sized.load(memory)
    return replace(load, geometry=candidate.geometry(memory.half_bytes))


def _row(candidate: Candidate, advice: Advice, memory: MemoryBudget) -> AdviceRow:
    load = advice.load
    is_fitting = advice.verdict in {FitLevel.FITS, FitLevel.NEEDS_4_BIT}
    options = _options(candidate, load, memory) if is_fitting else ()
    return AdviceRow(
        preset=advice.name,
        verdict="fits" if is_fitting else VERDICTS[advice.verdict],
        n_bytes=need(load).total,
        weights_bytes=load.weights,
        kv_bits=load.geometry.bits,
        max_agents=advice.n_agents,
        options=options,
        command=" ".join(["mlx-stack up", advice.name, *options]) if is_fitting else "",
        why=_why(advice, memory),
    )


def _options(candidate: Candidate, load: ServiceLoad, memory: MemoryBudget) -> tuple[str, ...]:
    """Options of `up` for this load; none where the preset fits."""
    own = candidate.load(memory)
    is_enough = own.n_slots >= load.n_slots and own.n_ctx >= load.n_ctx
    if is_enough and own.geometry.bits >= load.geometry.bits and fits(own, memory.usable):
        return ()
    changes = [
        ("--slots", load.n_slots, own.n_slots),
        ("--ctx", tokens(load.n_ctx), tokens(own.n_ctx)),
        ("--kv-bits", load.geometry.bits, candidate.preset.kv.bits),
    ]
    options = [word for name, new, old in changes if new != old for word in (name, str(new))]
    pct = option(load).budget_pct
    if pct is not None:
        options += ["--set", f"{BUDGET_KEY}={pct:g}"]
    return tuple(options)


def _why(advice: Advice, memory: MemoryBudget) -> str:
    free = memory.usable - need(advice.load).total
    match advice.verdict:
        case FitLevel.FITS if advice.load.geometry.bits == 16:
            return f"fits with full precision, {size(free)} to spare"
        case FitLevel.FITS:
            return f"fits with 8-bit KV, {size(free)} to spare"
        case FitLevel.NEEDS_4_BIT:
            return "fits only with 4-bit KV, which costs quality"
        case FitLevel.NOT_TRAINED:
            return "fits, but was not trained for so long a context"
    helps = [settings(change, advice.load) for change in nearest(advice.load, memory.usable)]
    if helps:
        return f"{size(-free)} too large; {' or '.join(helps)} would fit"
    return f"{size(-free)} too large"
