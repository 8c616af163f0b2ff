"""Preset derivation: slots, context and KV precision from config and sizes."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import overrides, presets
from mlxstack.config.presets import expanded, is_folder
from mlxstack.core.errors import BadRequest, SetupError, Taken
from mlxstack.core.formatting import size
from mlxstack.core.preset import KVSpec, ModelSpec, Preset
from mlxstack.host.hardware import MemoryBudget, this_memory
from mlxstack.host.home import Home, make_folder
from mlxstack.host.services import write_private
from mlxstack.models import model_files
from mlxstack.models.generation_config import FILE, sampling_defaults
from mlxstack.models.reference import Reference, resolve
from mlxstack.planner.candidate import Candidate, alone, files_of, of_files, of_preset
from mlxstack.planner.fit import SIZES, as_sets, fits_with, sized
from mlxstack.planner.memory_room import MemoryRoom, room_in
from mlxstack.policy.default_sampling import default_sampling, described, is_chosen
from mlxstack.policy.memory.capacity import LayerKind, kv_budget
from mlxstack.policy.memory.capacity_advice import CapacityOption, SlotSizes, choose_sizes

NOT_LOADED = {
    "model_type": "; docs/models.md lists the types of each, and a newer release may have the type",
    "quantization_config": "",
}
"""Keys of config.json with values that mlx-lm cannot load, and advice."""


class Reason(Struct, frozen=True):
    """One setting of a derived preset, and why it has this value."""

    setting: str
    value: str
    why: str


class DerivedPreset(Struct, frozen=True):
    """Derived preset, the origin of each value, and the plan.

    `base` is the listed preset of the same model whose other settings are taken over.
    """

    preset: Preset
    reasons: tuple[Reason, ...]
    candidate: Candidate
    base: str = ""


class WrittenPreset(Struct, frozen=True):
    """File of a preset; `derived` where it was derived from a model."""

    path: Path
    derived: DerivedPreset | None = None


def derive(reference: Reference, home: Home, room: MemoryRoom, fixed: SlotSizes) -> DerivedPreset:
    """Choose a preset; only the config is downloaded. Raises SetupError."""
    base = _listed_for(reference.id, home)
    alias = None
    if is_folder(reference.id):
        alias = reference.name
    model = ModelSpec(id=reference.id, alias=alias)
    if base is not None:
        model = base.model
    files = files_of(model)
    start = base or Preset(model=model)
    start = replace(start, name=reference.name, model=model)
    candidate = of_files(start, files)
    if candidate.reply.param in NOT_LOADED:
        advice = NOT_LOADED[candidate.reply.param]
        raise SetupError(f"{reference.id} cannot be served: {candidate.reply.refusal}{advice}")
    chosen = _choose(candidate, room, fixed)
    sizes = chosen or CapacityOption(
        fixed.n_slots or start.slots.count,
        fixed.n_ctx or start.slots.n_ctx,
        fixed.bits or start.kv.bits,
    )
    description = f"{reference.id}, sized for this machine"
    preset = _bounded(replace(sized(start, sizes), description=description))
    candidate = replace(candidate, preset=preset)
    origin = ""
    if base is not None:
        origin = base.name
    reasons = _reasons(candidate, room, fixed, is_planned=chosen is not None, base=origin)
    return DerivedPreset(preset, reasons, candidate, origin)


def write_preset(name: str, source: str, home: Home, fixed: SlotSizes) -> WrittenPreset:
    """Write a user's preset. Raises SetupError, Taken if it exists."""
    path = home.presets / f"{name}.yaml"
    if not presets.NAME.fullmatch(name):
        raise SetupError(f"`{name}` cannot be the name of a preset; use letters, digits, dashes")
    if path.exists():
        raise Taken(f"{path} exists already; remove it, or choose another name")
    derived = None
    if presets.is_known(source, home):
        over = [overrides.from_option(setting) for setting in as_sets(fixed)]
        presets.load(source, home, over)
        document = {"extends": presets.from_anywhere(source), "name": name}
        text = _yaml(document | overrides.document_of(over, path.parent).values)
    else:
        room = room_in(home, this_memory(os.environ), name)
        derived = derive(replace(resolve(source, home), name=name), home, room, fixed)
        presets.overridden(derived.preset, (), home)
        text = text_of(derived)
    make_folder(path.parent)
    write_private(path, text.encode())
    return WrittenPreset(path, derived)


def candidate_for(
    model: str, home: Home, memory: MemoryBudget, sets: tuple[str, ...] = ()
) -> Candidate:
    """Planner input of a preset, model or config. Raises SetupError."""
    over = overrides.given_overrides(os.environ, sets)
    file = expanded(model)
    if file.suffix == ".json" and file.is_file():
        files = model_files.read_config(file)
        return of_files(presets.overridden(alone(file.absolute()), over, home), files)
    if presets.is_known(model, home):
        return of_preset(presets.load(model, home, over).preset)
    derived = derive(resolve(model, home), home, MemoryRoom(memory), SlotSizes())
    changed = presets.overridden(derived.preset, over, home)
    return of_files(changed, derived.candidate.files)


def text_of(derived: DerivedPreset) -> str:
    """Preset as YAML, without what it has from its base."""
    preset = derived.preset
    document: dict[str, Any] = {"extends": derived.base} if derived.base else {}
    document |= {"name": preset.name, "description": preset.description}
    if not derived.base:
        alias = {"alias": preset.model.alias} if preset.model.alias else {}
        document["model"] = {"id": preset.model.id, **alias}
    document["slots"] = {"count": preset.slots.count, "n_ctx": preset.slots.n_ctx}
    if preset.kv.bits != KVSpec().bits:
        document["kv"] = {"bits": preset.kv.bits}
    document["sampling"] = {"thinking_budget": preset.sampling.thinking_budget}
    return _yaml(document)


def _yaml(document: dict[str, Any]) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def _bounded(preset: Preset) -> Preset:
    """The preset with thoughts of at most a quarter of its context."""
    budget = preset.slots.n_ctx // 4
    own = preset.sampling.thinking_budget
    if own is not None and 0 <= own < budget:
        budget = own
    return replace(preset, sampling=replace(preset.sampling, thinking_budget=budget))


def _listed_for(model: str, home: Home) -> Preset | None:
    """Listed preset of the model, if a hand-written one exists."""
    files = presets.files_in(presets.builtin_folder(), home.presets)
    written = tuple((str(file), file.stat().st_mtime_ns) for _, file in sorted(files.items()))
    return _by_model(written, home).get(model)


@lru_cache(maxsize=1)
def _by_model(written: tuple[tuple[str, int], ...], home: Home) -> dict[str, Preset]:
    """First preset of each model, read once; `written`: files and their times."""
    by_model: dict[str, Preset] = {}
    for file, _ in written:
        try:
            preset = presets.load(file, home).preset
        except SetupError:
            continue
        by_model.setdefault(preset.model.id, preset)
    return by_model


def _choose(candidate: Candidate, room: MemoryRoom, fixed: SlotSizes) -> CapacityOption | None:
    """Best sizes that fit; None if nothing fits or caches are unknown."""
    may_quantize = fixed.bits is not None or _can_quantize(candidate)

    def is_fitting(sizes: CapacityOption) -> bool:
        return (sizes.bits == 16 or may_quantize) and fits_with(candidate, sizes, room)

    batch = candidate.preset.batch
    n_rows = 1
    if batch.enabled:
        n_rows = batch.max_size
    return choose_sizes(is_fitting, candidate.n_trained, fixed, n_rows)


def _can_quantize(candidate: Candidate) -> bool:
    """Whether KV can be quantized; latent KV cannot.

    Latent KV is read outside of the attention function.
    """
    shape = candidate.reply.shape
    return shape is not None and all(
        layer.kind is not LayerKind.LATENT for layer in shape.geometry.layers
    )


def _reasons(
    candidate: Candidate, room: MemoryRoom, fixed: SlotSizes, is_planned: bool, base: str
) -> tuple[Reason, ...]:
    preset = candidate.preset
    files = candidate.files
    weights = candidate.weights.n_bytes(room.memory.half_bytes)
    source = "from config.json"
    if files.weights is not None:
        source = "measured"
    rows = [
        Reason("model", preset.model.id, candidate.architecture),
        Reason("weights", size(weights), source),
    ]
    planned = "default; nothing smaller is proposed"
    if is_planned:
        planned = "fits"
    trained = planned
    if candidate.n_trained:
        trained = f"trained for {candidate.n_trained}"
    precision = planned
    if preset.kv.bits == 16:
        precision = "the model's own"
    values = (preset.slots.count, preset.slots.n_ctx, preset.kv.bits)
    wished = (fixed.n_slots, fixed.n_ctx, fixed.bits)
    whys = (f"{planned} {size(room.free)}", trained, precision)
    for key, value, wish, reason in zip(SIZES, values, wished, whys, strict=True):
        rows.append(Reason(key, str(value), reason if wish is None else "given"))
    rows.append(_budget(candidate, room, weights))
    rows.append(_sampling(candidate, base))
    budget = preset.sampling.thinking_budget
    rows.append(Reason("thinking_budget", str(budget), "if it thinks: a quarter of the context"))
    return tuple(rows)


def _budget(candidate: Candidate, room: MemoryRoom, weights: int) -> Reason:
    try:
        load = candidate.load(room.memory, has_kv_share=False)
    except BadRequest as error:
        return Reason("KV budget", "auto", error.message)
    left = max(0, kv_budget(room.free, weights, load.workspace))
    live = load.geometry.n_bytes(load.n_ctx) * load.n_slots
    return Reason("KV budget", size(left), f"{size(live)} of it when all slots are full")


def _sampling(candidate: Candidate, base: str) -> Reason:
    """The sampling of a request that sets nothing, and its source."""
    preset = candidate.preset
    card = sampling_defaults(candidate.files.source.parent)
    sources = []
    if is_chosen(preset.sampling):
        sources.append(f"preset {base}")
    if is_chosen(card):
        sources.append(FILE)
    reason = ", ".join(sources) or "the model recommends none; llama-server's defaults"
    params = default_sampling(preset.sampling, card)
    return Reason("sampling", described(params), reason)
