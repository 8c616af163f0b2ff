"""Candidates: presets with their model's files, shape and weights."""

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import presets
from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.errors import BadRequest, SetupError, Unsupported
from mlxstack.core.preset import AUTO, ModelSpec, Preset, ServiceKind, Speculation, scaled_context
from mlxstack.host.hardware import MemoryBudget
from mlxstack.host.home import Home
from mlxstack.models import bounded_json, model_files
from mlxstack.models.drafter_configs import planned_config
from mlxstack.models.model_files import ModelFiles, n_trained_in
from mlxstack.models.mtp_layouts import head_tensors
from mlxstack.models.rope_config import (
    ignored_scaling,
    n_without_scaling,
    not_scaled,
    scaled_config,
)
from mlxstack.planner.model_shapes import shapes_of
from mlxstack.planner.vision import VisionPlan, vision_plan
from mlxstack.policy.memory.capacity import (
    PLAIN_BITS,
    Budget,
    Division,
    Geometry,
    ModelShape,
    ServiceLoad,
    ShapeReply,
    Weights,
    divided,
    kv_bits,
    quantized,
    workspace_of,
)

UNKNOWN_GPU = MemoryBudget(0, 0, 2, "a GPU")


SINGLE_BYTES = 4


class Candidate(Struct, frozen=True):
    """Preset whose memory can be planned."""

    preset: Preset
    files: ModelFiles
    reply: ShapeReply
    """Shape of the model as mlx-lm builds it, or the reason why it does not."""
    draft: "Candidate | None" = None
    """Draft model; None where there is none or nothing is known of it."""
    vision: VisionPlan = VisionPlan()
    """Its tower is part of the weights."""
    head: Weights = Weights()
    """MTP head, part of the weights."""

    @property
    def is_measured(self) -> bool:
        """Whether the files of the weights are here."""
        return self.files.weights is not None

    @property
    def weights(self) -> Weights:
        """Weights, measured from their files, else estimated. Raises Unsupported if unknown."""
        built = None
        if self.reply.shape is not None:
            built = self.reply.shape.weights
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
        kind = self._ignored_scaling()
        if kind and not n_without_scaling(self.files.config):
            raise Unsupported(ignored_scaling(self.architecture, kind), "rope_scaling")
        return self.reply.shape

    @property
    def architecture(self) -> str:
        """Model type of the config."""
        return str(self.files.config.get("model_type", ""))

    @property
    def n_trained(self) -> int:
        """Context length in tokens, as its model scales it; 0 if unknown."""
        if self._ignored_scaling():
            return n_without_scaling(self.files.config)
        return scaled_context(n_trained_in(self.files.config), self.preset.model)

    def geometry(self, half_bytes: int = 2, bits: int = 16) -> Geometry:
        """The caches where half precision takes `half_bytes`. Raises Unsupported."""
        shape = self.shape
        if self.preset.hosts and shape.division is Division.NONE:
            raise Unsupported(
                f"mlx-lm cannot divide models of type '{self.architecture}' between machines",
                "hosts",
            )
        geometry = shape.geometry
        if half_bytes == SINGLE_BYTES:
            geometry = shape.widened
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

    def _ignored_scaling(self) -> str:
        """Type of the config's scaling that the model ignores; "": none."""
        shape = self.reply.shape
        if shape is None or self.preset.model.rope is not None:
            return ""
        return shape.ignored_scaling

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
        if pct == AUTO:
            return None
        return Budget(total_bytes, pct)


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
    return ModelFiles(bounded_json.read_config_object(source), source, hub_bytes=n_bytes)


def of_preset(preset: Preset) -> Candidate:
    """The candidate of a resolved preset. Raises SetupError."""
    return of_files(preset, model_files.find_model(preset.model, excerpts()))


def alone(config: Path) -> Preset:
    """A preset for a config.json by its path."""
    name = config.stem
    if config.name == model_files.CONFIG:
        name = config.parent.name
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
        files = model_files.find_model(alone.model, excerpts())
    except SetupError:
        return None
    return alone, replace(files, config=planned_config(files.config))


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
    n_bits = _size(table.get("bits"), 4) + 32 / _size(table.get("group_size"), 64)
    return Weights(packed=int((head.n_half + head.n_single) * n_bits / 8))


def _size(value: Any, default: int) -> int:
    """A size of a config, which may hold anything."""
    return value if isinstance(value, int) and value > 0 else default


def with_shapes(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates whose models have a shape."""
    return [candidate for candidate in candidates if candidate.reply.shape is not None]


def shipped(home: Home) -> list[Candidate]:
    """One candidate per chat model of the presets, without the embedded one.

    A preset derived from a served model comes after the listed one of the same model. Presets that
    cannot be read, and models of which nothing is known, are passed over; a type that no library
    here has is among them, with its refusal. Raises SetupError where no model can be built at all.
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
    return candidates
