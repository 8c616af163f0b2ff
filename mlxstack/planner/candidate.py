"""Candidate of the planner: weights, caches and load of a preset."""

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxstack.config import presets
from mlxstack.config.preset_paths import BUILTIN_MODEL
from mlxstack.core.errors import BadRequest, SetupError, Unsupported
from mlxstack.core.model_info import Weights
from mlxstack.core.preset import AUTO, ModelSpec, Preset, ServiceKind, scaled_context
from mlxstack.host.home import Home
from mlxstack.models import model_files
from mlxstack.models.model_files import ModelFiles
from mlxstack.models.rope_config import not_scaled, scaled_config
from mlxstack.planner.model_shapes import shapes_of
from mlxstack.planner.vision_plan import VisionPlan, vision_plan
from mlxstack.policy.memory import workspace
from mlxstack.policy.memory.capacity import Budget, ServiceLoad
from mlxstack.policy.memory.kv_geometry import (
    Division,
    Geometry,
    ModelShape,
    ShapeReply,
    divided,
    quantized,
)

SINGLE = 4


class Candidate(Struct, frozen=True):
    """`weights` are measured from their files, else estimated; `reply` is mlx-lm's model.

    `draft` is the draft model, None where there is none or nothing is known of it. A tower of
    `vision` is part of the weights.
    """

    preset: Preset
    files: ModelFiles
    reply: ShapeReply
    draft: "Candidate | None" = None
    vision: VisionPlan = VisionPlan()

    @property
    def is_measured(self) -> bool:
        """Whether the files of the weights are here."""
        return self.files.weights is not None

    @property
    def weights(self) -> Weights:
        """Weights in memory. Raises Unsupported where they are unknown."""
        built = self.reply.shape.weights if self.reply.shape is not None else None
        if weights := self.files.weights or built:
            return weights.plus(self.vision.tower)
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
        config: dict[str, Any] = self.files.config
        text = config.get("text_config") or {}
        n_trained = int({**config, **text}.get("max_position_embeddings") or 0)
        return scaled_context(n_trained, self.preset.model)

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

    def load(self, half_bytes: int = 2, total_bytes: int | None = None) -> ServiceLoad:
        """Load of a preset's service; KV gets a share of `total_bytes`.

        Raises Unsupported.
        """
        slots, chunk, kv = self.preset.slots, self.preset.prefill.chunk_size, self.preset.kv
        bits = 16 if kv.quantized_start >= slots.n_ctx else kv.bits
        geometry, shape = self.geometry(half_bytes, bits), self.shape
        bytes_beside = workspace.workspace_bytes(shape, chunk, slots.count) * (half_bytes // 2)
        if half_bytes != SINGLE:
            bytes_beside += workspace.peak_score_bytes(shape, bits, chunk, slots.n_ctx)
        weights, draft = self._own_weights(half_bytes), self.draft
        if draft is not None:
            weights += draft.weights.n_bytes(half_bytes)
        return ServiceLoad(
            geometry=geometry,
            weights=weights,
            workspace=bytes_beside,
            n_slots=slots.count,
            n_ctx=slots.n_ctx,
            chunk=chunk,
            budget=self._budget(total_bytes),
            draft=Geometry(()) if draft is None else draft.geometry(half_bytes),
        )

    def _own_weights(self, half_bytes: int) -> int:
        """Weights in the memory of one machine.

        Of several, each has a share of the layers; embeddings and output stay whole. Of a pipeline
        it is the machine with the most layers.
        """
        n_bytes, n_ranks = self.weights.n_bytes(half_bytes), max(1, len(self.preset.hosts))
        if n_ranks == 1:
            return n_bytes
        ends = min(n_bytes, 2 * self.shape.n_vocab * self.shape.hidden * half_bytes)
        share = Fraction(1, n_ranks)
        if self.shape.division is Division.PIPELINE:
            n_layers = len(self.shape.geometry.layers)
            share = Fraction(-(-n_layers // n_ranks), n_layers)
        return ends + ceil((n_bytes - ends) * share)

    def _budget(self, total_bytes: int | None) -> Budget | None:
        """Budget of a fixed share; None for `auto` and embedding models."""
        if total_bytes is None or self.preset.kind is ServiceKind.EMBEDDING:
            return None
        pct = self.preset.prefix_cache.memory_budget_pct
        return None if pct == AUTO else Budget(total_bytes, pct)


def excerpts() -> Path:
    """Folder of config excerpts that come with the presets."""
    return presets.builtin_folder() / "configs"


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
    drafts = {at: draft for at, (preset, _) in enumerate(pairs) if (draft := _draft_of(preset))}
    files = [*(files for _, files in pairs), *(files for _, files in drafts.values())]
    specs = [*(preset for preset, _ in pairs), *(preset for preset, _ in drafts.values())]
    replies = shapes_of([_config(*one) for one in zip(specs, files, strict=True)])
    beside = zip(drafts.items(), replies[len(pairs) :], strict=True)
    draft_candidates = {at: Candidate(*draft, reply) for (at, draft), reply in beside}
    each = enumerate(zip(pairs, replies[: len(pairs)], strict=True))
    return [
        Candidate(*pair, reply, draft_candidates.get(at), vision_plan(*pair))
        for at, (pair, reply) in each
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


def shipped(home: Home) -> list[Candidate]:
    """One candidate per chat model of the presets, without the embedded one.

    A preset derived from a served model comes after the listed one of the same model. Presets that
    cannot be read, and models of which nothing is known, are passed over.
    """
    files = presets.listed(home)
    models: dict[str, tuple[Preset, ModelFiles]] = {}
    for name in sorted(files, key=lambda one: (files[one].parent == home.derived_presets, one)):
        try:
            preset = presets.load(name, home).preset
            if preset.kind is ServiceKind.CHAT and preset.model.id not in {*models, BUILTIN_MODEL}:
                found = model_files.find_model(preset.model, excerpts())
                models[preset.model.id] = preset, found
        except (SetupError, BadRequest):
            continue
    return [
        candidate
        for candidate in of_many(list(models.values()))
        if candidate.reply.shape is not None
    ]
