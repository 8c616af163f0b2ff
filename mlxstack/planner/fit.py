"""Fit of a preset: memory that its service needs, and memory that is left."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import presets
from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.errors import BadRequest, DoesNotFit, SetupError, Unsupported
from mlxstack.core.formatting import size
from mlxstack.core.preset import AUTO, ModelSpec, Preset, ServiceKind, Speculation, scaled_context
from mlxstack.host import services
from mlxstack.host.hardware import CHILD_FAULTS, MEMORY_VARIABLE, MemoryBudget, ask_mlx, last_line
from mlxstack.host.home import Home
from mlxstack.host.process import held_bytes
from mlxstack.host.services import ServiceSpec, ServiceState, read_json
from mlxstack.models import model_files
from mlxstack.models.model_files import (
    ModelFiles,
    head_tensors,
    n_trained_in,
    tower_weights,
    vision_files,
)
from mlxstack.models.rope_config import not_scaled, scaled_config
from mlxstack.policy.memory.capacity import (
    PLAIN_BITS,
    Budget,
    Division,
    Geometry,
    MemoryNeed,
    ModelShape,
    ServiceLoad,
    ShapeReply,
    Weights,
    divided,
    fits,
    kv_bits,
    need,
    quantized,
    workspace_of,
)
from mlxstack.policy.memory.capacity_advice import CapacityOption, SlotSizes, nearest
from mlxstack.policy.memory.memory_shares import MemoryClaim
from mlxstack.text.images.checkpoint import VisionFiles
from mlxstack.text.images.families import FAMILIES, family_of, n_tower_parameters, why_not_served

# The file itself: with `-m` its package would import mlx-lm, and that transformers.
PROGRAM = Path(__file__).parent.parent / "engine" / "model" / "model_shape.py"
MAX_S = 120.0
UNKNOWN_GPU = MemoryBudget(0, 0, 2, "a GPU")
LIMIT_S = 20.0
"""CPU seconds to build a model; the largest published ones take two."""
MAX_BYTES = 8 * 1024**3


_shapes: dict[bytes, ShapeReply] = {}
"""Shapes of this process by config: a child that imports MLX takes most of a second."""


def shapes_of(configs: Sequence[Mapping[str, Any]]) -> list[ShapeReply]:
    """Shape of each parsed config.json, or why it has none.

    Those that are not known yet are built in one child process.
    """
    keys = [msgspec.json.encode(config, order="deterministic") for config in configs]
    unknown = {key: config for key, config in zip(keys, configs, strict=True) if key not in _shapes}
    built = dict(zip(unknown, _built([*unknown.values()]), strict=True))
    _shapes.update({key: reply for key, reply in built.items() if reply.shape is not None})
    return [built.get(key) or _shapes[key] for key in keys]


def _built(configs: Sequence[Mapping[str, Any]]) -> list[ShapeReply]:
    if not configs:
        return []
    program = ["-P", str(PROGRAM), str(LIMIT_S * len(configs)), str(MAX_BYTES)]
    try:
        return ask_mlx(program, list[ShapeReply], MAX_S, configs)
    except CHILD_FAULTS as why:
        if len(configs) > 1:
            return [reply for config in configs for reply in _built([config])]
        reason = last_line(why)
        if (code := getattr(why, "returncode", 0)) < 0:
            reason = f"building it was ended by {signal.Signals(-code).name}"
        return [ShapeReply(refusal=f"MLX cannot build this model here: {reason}")]


class VisionPlan(Struct, frozen=True):
    """Served tower: files, weights, and at most `max_pixels` of an image.

    `why_not` tells why a model with a tower serves no images.
    """

    files: VisionFiles | None = None
    tower: Weights = Weights()
    max_pixels: int = 0
    why_not: str = ""

    def n_tokens(self, width: int, height: int) -> int:
        """Tokens of an image, or 0. Raises SetupError for broken settings."""
        if self.files is None:
            return 0
        family = FAMILIES[str(self.files.config["model_type"])]
        processor = family.processor(self.files, self.max_pixels)
        return len(processor.expand(processor.size(width, height)))


def vision_plan(preset: Preset, files: ModelFiles) -> VisionPlan:
    """Images of a preset, by files or by config.json. Raises SetupError."""
    if files.weights is None:
        n_half = n_tower_parameters(files.config)
        expected = VisionFiles(files.config, b"{}", {}, "") if n_half else None
        return _served(preset, expected, Weights(n_half=n_half))
    tensors = vision_files(files.source.parent)
    if tensors is not None and tensors.config.get("model_type") in FAMILIES:
        tensors = None if family_of(tensors) is None else tensors
    return _served(preset, tensors, Weights() if tensors is None else tower_weights(tensors))


def _served(preset: Preset, files: VisionFiles | None, tower: Weights) -> VisionPlan:
    """Images of a preset whose model has a whole tower."""
    if files is None or preset.kind is ServiceKind.EMBEDDING:
        return VisionPlan()
    if preset.hosts:
        return VisionPlan(why_not="several machines serve no images")
    if why_not := why_not_served(files.config, preset.kv.bits):
        return VisionPlan(why_not=why_not)
    return VisionPlan(files, tower, preset.vision.max_pixels)


SINGLE = 4


class Candidate(Struct, frozen=True):
    """`weights` are measured from their files, else estimated; `reply` is mlx-lm's model.

    `draft` is the draft model, None where there is none or nothing is known of it. A tower of
    `vision` and an MTP `head` are part of the weights.
    """

    preset: Preset
    files: ModelFiles
    reply: ShapeReply
    draft: "Candidate | None" = None
    vision: VisionPlan = VisionPlan()
    head: Weights = Weights()

    @property
    def is_measured(self) -> bool:
        """Whether the files of the weights are here."""
        return self.files.weights is not None

    @property
    def weights(self) -> Weights:
        """Weights in memory. Raises Unsupported where they are unknown."""
        built = self.reply.shape.weights if self.reply.shape is not None else None
        if weights := self.files.weights or built:
            return weights.plus(self.vision.tower).plus(self.head)
        if self.files.hub_bytes:
            return Weights(packed=self.files.hub_bytes)
        raise Unsupported(self.reply.refusal or "only the files tell the weights' size")

    @property
    def shape(self) -> ModelShape:
        """The model as mlx-lm builds it. Raises Unsupported."""
        if self.reply.shape is None:
            raise Unsupported(self.reply.refusal, self.reply.param)
        if self.preset.model.rope is not None and not self.reply.shape.has_scaled_rope:
            raise Unsupported(not_scaled(self.architecture), "model.rope")
        return self.reply.shape

    @property
    def architecture(self) -> str:
        """Model type of the config."""
        return str(self.files.config.get("model_type", ""))

    @property
    def n_trained(self) -> int:
        """Context length in tokens, scaled by `model.rope`; 0 if unknown."""
        return scaled_context(n_trained_in(self.files.config), self.preset.model)

    def geometry(self, half_bytes: int = 2, bits: int = 16) -> Geometry:
        """The caches where half precision takes `half_bytes`. Raises Unsupported."""
        shape = self.shape
        if self.preset.hosts and shape.division is Division.NONE:
            raise Unsupported(
                f"mlx-lm cannot divide models of type '{self.architecture}' between machines",
                "hosts",
            )
        geometry = shape.widened if half_bytes == SINGLE else shape.geometry
        own = divided(geometry, max(1, len(self.preset.hosts)), shape.division)
        return quantized(own, bits, self.preset.kv.group_size)

    def load(
        self, machine: MemoryBudget = UNKNOWN_GPU, *, has_kv_share: bool = True
    ) -> ServiceLoad:
        """Load of a preset's service on `machine`.

        Without `has_kv_share` KV is bounded by memory alone. Raises Unsupported.
        """
        half_bytes = machine.half_bytes
        geometry = self.geometry(half_bytes, kv_bits(self.preset))
        slots = self.preset.slots
        weights = self._own_weights(half_bytes)
        drafts = Geometry(())
        if self.draft is not None:
            weights += self.draft.weights.n_bytes(half_bytes)
            drafts = self.draft.geometry(half_bytes)
        elif self.head != Weights() and geometry.full_layers:
            # A head keeps KV of one layer, which is never quantized.
            last = geometry.layers[geometry.full_layers[-1]]
            drafts = replace(geometry, layers=(last,), bits=PLAIN_BITS)
        return ServiceLoad(
            geometry=geometry,
            weights=weights,
            workspace=workspace_of(
                self.shape, self.preset, half_bytes, machine.working_set, machine.buffered_bytes
            ),
            n_slots=slots.count,
            n_ctx=slots.n_ctx,
            chunk=self.preset.prefill.chunk_size,
            budget=self._budget(machine.total) if has_kv_share else None,
            draft=drafts,
        )

    def _own_weights(self, half_bytes: int) -> int:
        """Weights in the memory of one machine.

        Of several, each has a share of the layers; embeddings and output stay whole. Of a pipeline
        it is the machine with the most layers.
        """
        n_bytes = self.weights.n_bytes(half_bytes)
        n_ranks = max(1, len(self.preset.hosts))
        if n_ranks == 1:
            return n_bytes
        ends = min(n_bytes, 2 * self.shape.n_vocab * self.shape.hidden * half_bytes)
        share = Fraction(1, n_ranks)
        if self.shape.division is Division.PIPELINE:
            n_layers = len(self.shape.geometry.layers)
            share = Fraction(-(-n_layers // n_ranks), n_layers)
        return ends + ceil((n_bytes - ends) * share)

    def _budget(self, total_bytes: int) -> Budget | None:
        """Budget of a fixed share of memory; else None."""
        if not total_bytes or self.preset.kind is ServiceKind.EMBEDDING:
            return None
        pct = self.preset.prefix_cache.memory_budget_pct
        return None if pct == AUTO else Budget(total_bytes, pct)


def excerpts() -> Path:
    """Folder of config excerpts that come with the presets."""
    return presets.builtin_folder() / "configs"


def files_of(model: ModelSpec) -> ModelFiles:
    """Files of a model, here or on the hub. Raises SetupError."""
    return model_files.find_model(model, excerpts(), _ask_hub)


def _ask_hub(model: ModelSpec) -> ModelFiles:
    from mlxstack.models import hub  # noqa: PLC0415 - slow, and rarely needed

    source = hub.fetch_config(model.id, model.revision)
    n_bytes = hub.plan(model.id, model.revision).n_weights
    return ModelFiles(model_files.read_config_object(source), source, hub_bytes=n_bytes)


def of_preset(preset: Preset) -> Candidate:
    """The candidate of a resolved preset. Raises SetupError."""
    return of_files(preset, model_files.find_model(preset.model, excerpts()))


def alone(config: Path) -> Preset:
    """A preset for a config.json by its path."""
    name = config.parent.name if config.name == model_files.CONFIG else config.stem
    return Preset(model=ModelSpec(id=str(config.parent)), name=name or "model")


def of_files(preset: Preset, files: ModelFiles) -> Candidate:
    """The candidate of a preset whose model's files are known."""
    return of_many([(preset, files)])[0]


def of_many(pairs: Sequence[tuple[Preset, ModelFiles]]) -> list[Candidate]:
    """Candidates of presets with their models' files, by one child process."""
    drafts = [_draft_of(preset) for preset, _ in pairs]
    all_pairs = [*pairs, *filter(None, drafts)]
    replies = shapes_of([_config(*pair) for pair in all_pairs])
    candidates = [Candidate(*pair, reply) for pair, reply in zip(all_pairs, replies, strict=True)]
    of_drafts = iter(candidates[len(pairs) :])
    return [
        replace(
            candidate,
            draft=None if draft is None else next(of_drafts),
            vision=vision_plan(candidate.preset, candidate.files),
            head=_head(candidate.preset, candidate.files, candidate.reply.shape),
        )
        for candidate, draft in zip(candidates, drafts, strict=False)
    ]


def _config(preset: Preset, files: ModelFiles) -> dict[str, Any]:
    """Config of the model as it is built; without a scaling that it cannot have."""
    config: dict[str, Any] = files.config
    if preset.model.rope is None:
        return config
    with suppress(SetupError):
        return scaled_config(config, preset.model.rope)
    return config


def _draft_of(preset: Preset) -> tuple[Preset, ModelFiles] | None:
    """Draft model of a preset; None while nothing is known of it."""
    if preset.model.draft is None:
        return None
    alone = Preset(model=ModelSpec(id=preset.model.draft))
    try:
        return alone, model_files.find_model(alone.model, excerpts())
    except SetupError:
        return None


def _head(preset: Preset, files: ModelFiles, shape: ModelShape | None) -> Weights:
    """MTP head of a preset: measured, else by the model's shape."""
    model = preset.model
    expected = head_tensors(files.config)
    is_drafting = preset.speculation is Speculation.AUTO and preset.kind is ServiceKind.CHAT
    if expected is None or not is_drafting or preset.hosts or model.draft is not None:
        return Weights()
    source = files
    is_expected = files.weights is None and expected.is_expected
    if model.mtp is not None:
        is_expected = True
        with suppress(SetupError):
            source = model_files.find_model(ModelSpec(id=model.mtp), excerpts())
    head = source.head
    table = files.config.get("quantization")
    if head == Weights():
        if is_expected and shape is not None:
            return shape.head
        return head
    if not isinstance(table, dict) or head.packed:
        return head
    # The head gets the quantization of the model, with two numbers of 16 bits for each group.
    n_bits = (table.get("bits") or 4) + 32 / (table.get("group_size") or 64)
    return Weights(packed=int((head.n_half + head.n_single) * n_bits / 8))


def shipped(home: Home) -> list[Candidate]:
    """One candidate per chat model of the presets, without the embedded one.

    A preset derived from a served model comes after the listed one of the same model. Presets that
    cannot be read, and models of which nothing is known, are passed over. Raises SetupError where
    no model can be built at all.
    """
    files = presets.listed(home)
    models: dict[str, tuple[Preset, ModelFiles]] = {}
    for name in sorted(
        files,
        key=lambda preset_name: (files[preset_name].parent == home.derived_presets, preset_name),
    ):
        try:
            preset = presets.load(name, home).preset
            if preset.kind is ServiceKind.CHAT and preset.model.id not in {*models, BUILTIN_MODEL}:
                model = model_files.find_model(preset.model, excerpts())
                models[preset.model.id] = preset, model
        except (SetupError, BadRequest):
            continue
    candidates = of_many(list(models.values()))
    if candidates and all(candidate.reply.shape is None for candidate in candidates):
        raise SetupError(f"{candidates[0].reply.refusal}; see `mlx-stack doctor`")
    return [candidate for candidate in candidates if candidate.reply.shape is not None]


OPTION = "--set "
BUDGET_KEY = "prefix_cache.memory_budget_pct"
SIZES = ("slots.count", "slots.n_ctx", "kv.bits")
"""Keys of slots, tokens per slot and KV bits."""


class MemoryRoom(Struct, frozen=True):
    """Memory of this computer, and bytes that each running service may take."""

    memory: MemoryBudget
    claims: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Bytes that one more service may take."""
        return self.memory.usable - sum(self.claims.values())


class MemberService(Struct, frozen=True):
    """Part of a gateway's spec: a service behind it."""

    service: ServiceSpec


class GatewayMemory(Struct, frozen=True):
    """Part of a gateway's spec: `members` that take turns within `budget` bytes."""

    budget: int
    members: tuple[MemberService, ...]


def room_in(home: Home, memory: MemoryBudget, but: str | None = None) -> MemoryRoom:
    """Memory next to all running services but `but` and this process itself."""
    taken = {
        service_claim.name: service_claim.least for service_claim in claims_in(home, memory, but)
    }
    for name, gateway in gateways_in(home).items():
        for member in gateway.members:
            taken[name] = taken.get(name, 0) + taken.pop(member.service.name, 0)
    return MemoryRoom(memory, taken)


def refuse_if_too_big(candidate: Candidate, room: MemoryRoom, option: str = OPTION) -> str | None:
    """Raise DoesNotFit, with options that fit, for too large a service.

    Each key of an option comes after `option`. Of a model whose caches are unknown only the weights
    are counted; then the reason is returned.
    """
    unknown = None
    try:
        load = candidate.load(room.memory)
    except BadRequest as why:
        if (why.param or "").startswith(("kv.", "hosts")):
            raise SetupError(f"{why.param}: {why.message}") from why
        unknown = why.message
        try:
            weights = candidate.weights.n_bytes(room.memory.half_bytes)
        except BadRequest:
            return unknown
        load = ServiceLoad(Geometry(()), weights)
    if not fits(load, room.free):
        raise DoesNotFit(_refusal(candidate, load, room, option))
    return unknown


def settings(option: CapacityOption, load: ServiceLoad, before: str = OPTION) -> str:
    """Differences of an option from `load`, each key after `before`."""
    new = (option.n_slots, option.n_ctx, option.bits)
    sizes = zip(SIZES, new, (load.n_slots, load.n_ctx, load.geometry.bits), strict=True)
    changes = [f"{before}{key}={value}" for key, value, old in sizes if value != old]
    if option.budget_pct is not None:
        changes.append(f"{before}{BUDGET_KEY}={option.budget_pct:g}")
    return " ".join(changes)


def sized(preset: Preset, option: CapacityOption) -> Preset:
    """A preset with the settings of an option."""
    cache = preset.prefix_cache
    pct = option.budget_pct
    return replace(
        preset,
        slots=replace(preset.slots, count=option.n_slots, n_ctx=option.n_ctx),
        kv=replace(preset.kv, bits=option.bits),
        prefix_cache=cache if pct is None else replace(cache, memory_budget_pct=pct),
    )


def as_sets(fixed: SlotSizes) -> tuple[str, ...]:
    """The sizes that are given, as `--set` takes them."""
    sizes = zip(SIZES, (fixed.n_slots, fixed.n_ctx, fixed.bits), strict=True)
    return tuple(f"{key}={value}" for key, value in sizes if value is not None)


def _breakdown(load: ServiceLoad, is_measured: bool) -> list[tuple[str, int, str]]:
    """Parts of the load: name, bytes, explanation."""
    parts: MemoryNeed = need(load)
    n_slots = load.n_slots
    n_ctx = load.n_ctx
    geometry = load.geometry
    return [
        ("weights", parts.weights, "measured" if is_measured else "estimated"),
        ("KV full", parts.kv_full, f"{n_slots} x {n_ctx} tokens x {geometry.growth} bytes"),
        ("KV windows", parts.kv_state, "sliding windows and other states of fixed size"),
        ("workspace", parts.workspace, f"activations of {load.chunk} tokens, logits"),
        ("margin", parts.margin, "tokenizer, kernels, the process"),
    ]


def _refusal(candidate: Candidate, load: ServiceLoad, room: MemoryRoom, option: str) -> str:
    memory = room.memory
    lines = _breakdown(load, candidate.is_measured)
    lines += [(f"`{name}`", n, "runs beside it") for name, n in room.claims.items()]
    total = sum(n_bytes for _, n_bytes, _ in lines)
    rows = [f"  {name:<11} {size(n_bytes):>9}  {word}" for name, n_bytes, word in lines if n_bytes]
    reason = (
        f"{size(total)} are needed, {memory.owner} has {size(memory.usable)} for models "
        f"(of {size(memory.total)})"
    )
    if total <= memory.usable:
        reason = over_budget(load)
    return "\n".join(
        [
            f"`{candidate.preset.name}` does not fit: {reason}",
            *rows,
            _way_out(candidate, load, room, option),
        ]
    )


def over_budget(load: ServiceLoad) -> str:
    """Sentence on live KV over the engine's budget; "" where it fits."""
    budget = load.budget
    kv = need(load).kv
    if budget is None or kv <= budget.n_bytes:
        return ""
    return (
        f"{load.n_slots} slots x {load.n_ctx} tokens are {size(kv)} of KV, and "
        f"{BUDGET_KEY} {budget.pct:g} gives KV {size(budget.n_bytes)} "
        f"({budget.pct:g} % of {size(budget.total)})"
    )


def _way_out(candidate: Candidate, load: ServiceLoad, room: MemoryRoom, option: str) -> str:
    """Settings and stops with which the service fits, each one computed."""
    ways = [
        way
        for change in nearest(load, room.free)
        if fits_with(candidate, change, room, has_kv_share=True)
        if (way := settings(change, load, option))
    ]
    ways += [f"mlx-stack down {' '.join(names)}" for names in _stops(load, room)]
    if ways:
        return "what would help: " + ", or ".join(ways)
    return (
        "no setting makes it fit; take a smaller model, or set "
        f"{MEMORY_VARIABLE} to the memory that there is, such as 48GB"
    )


def fits_with(
    candidate: Candidate, option: CapacityOption, room: MemoryRoom, *, has_kv_share: bool = False
) -> bool:
    """Whether the service fits with these settings and their buffers."""
    changed = replace(candidate, preset=sized(candidate.preset, option))
    try:
        return fits(changed.load(room.memory, has_kv_share=has_kv_share), room.free)
    except BadRequest:
        return False


def _stops(load: ServiceLoad, room: MemoryRoom) -> list[tuple[str, ...]]:
    """Services to stop so that the load fits: one, else all."""
    single: list[tuple[str, ...]] = [
        (name,) for name, n_bytes in room.claims.items() if fits(load, room.free + n_bytes)
    ]
    if single or len(room.claims) < 2 or not fits(load, room.memory.usable):
        return single
    return [tuple(room.claims)]


def claim_of(preset: Preset, memory: MemoryBudget, name: str) -> MemoryClaim:
    """Claim of a preset's service. Raises SetupError, BadRequest."""
    load = of_preset(preset).load(memory)
    if preset.kind is ServiceKind.EMBEDDING:
        return MemoryClaim(name, need(load).total, share=0)
    return claim(load, name)


def claim(load: ServiceLoad, name: str = "") -> MemoryClaim:
    """Claim of a service that keeps KV."""
    parts = need(load)
    share = load.budget
    fixed_share = None if share is None else share.n_bytes
    return MemoryClaim(name, parts.total - parts.kv, parts.kv, fixed_share)


def gateways_in(home: Home) -> dict[str, GatewayMemory]:
    """Memory of each running gateway, by its name."""
    names = [state.spec.name for state in services.running(home) if services.is_gateway(state.spec)]
    memories = {name: read_json(home.gateway_file(name), GatewayMemory) for name in names}
    return {name: gateway for name, gateway in memories.items() if gateway is not None}


def claims_in(home: Home, memory: MemoryBudget, but: str | None) -> tuple[MemoryClaim, ...]:
    """Claims of all running services but `but` and this process itself.

    Members of a gateway take turns: its own claim is negative where theirs exceed its budget.
    """
    running = [state for state in services.running(home) if state.spec.name != but]
    counted = [state for state in running if not (state.worker and state.worker.pid == os.getpid())]
    claims = {state.spec.name: _claim(home, state, memory) for state in counted}
    for name, gateway in gateways_in(home).items():
        members = [claims[m.service.name] for m in gateway.members if m.service.name in claims]
        excess = max(0, sum(member.least for member in members) - gateway.budget)
        if name in claims:
            claims[name] = MemoryClaim(name, -excess, share=0)
    return tuple(claims.values())


def _claim(home: Home, state: ServiceState, memory: MemoryBudget) -> MemoryClaim:
    """Claim of a running service; its footprint where its model is unknown."""
    name = state.spec.name
    if services.is_gateway(state.spec):
        # Its plan leaves nothing for its own process, which the system's reserve covers.
        return MemoryClaim(name, 0, share=0)
    preset = read_json(home.preset_file(name), Preset)
    if preset is not None:
        with suppress(SetupError, BadRequest):
            return claim_of(preset, memory, name)
    process = state.worker or state.supervisor
    return MemoryClaim(name, held_bytes(process.pid), share=0)
