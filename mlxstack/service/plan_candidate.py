"""Preset or model as the planner sees it: its weights, caches and load."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import BadRequest, SetupError, Unsupported
from mlxstack.core.model_info import Weights
from mlxstack.core.preset import ModelSpec, Preset, ServiceKind
from mlxstack.host import model_files, presets
from mlxstack.host.home import Home
from mlxstack.host.model_files import ModelFiles
from mlxstack.host.overrides import Override
from mlxstack.host.preflight import BUILTIN_MODEL
from mlxstack.policy import kv_geometry_by_model, weight_size
from mlxstack.policy.capacity import Budget, ServiceLoad
from mlxstack.policy.kv_geometry import Geometry, quantized

SINGLE = 4


class Candidate(Struct, frozen=True):
    """Preset with its model; `weights` are measured, or estimated from the config."""

    preset: Preset
    files: ModelFiles
    weights: Weights
    is_measured: bool

    @property
    def architecture(self) -> str:
        """Model type of the config."""
        return str(self.files.config.get("model_type", ""))

    @property
    def n_trained(self) -> int:
        """Context length of the training in tokens; 0 when the config has none."""
        config: dict[str, Any] = self.files.config
        text = config.get("text_config") or {}
        return int({**config, **text}.get("max_position_embeddings") or 0)

    def geometry(self, half_bytes: int = 2, bits: int = 16) -> Geometry:
        """KV geometry for `half_bytes` per half-precision number. Raises Unsupported."""
        found = kv_geometry_by_model.geometry(self.files.config)
        if half_bytes == SINGLE:
            found = msgspec.structs.replace(found, element_bytes=SINGLE)
        return quantized(found, bits, self.preset.kv.group_size)

    def load(self, half_bytes: int = 2, total_bytes: int | None = None) -> ServiceLoad:
        """Load of a service of this preset; its KV budget is a share of `total_bytes`.

        Raises Unsupported.
        """
        slots, chunk, kv = self.preset.slots, self.preset.prefill.chunk_size, self.preset.kv
        bits = 16 if kv.quantized_start >= slots.n_ctx else kv.bits
        geometry = self.geometry(half_bytes, bits)
        try:
            config = self.files.config
            workspace = kv_geometry_by_model.workspace_bytes(config, chunk, slots.count)
            workspace *= half_bytes // 2
            if half_bytes != SINGLE:
                workspace += kv_geometry_by_model.peak_score_bytes(config, bits, chunk, slots.n_ctx)
        except KeyError as missing:
            raise Unsupported(f"config.json lacks {missing}, which its workspace needs") from None
        return ServiceLoad(
            geometry=geometry,
            weights=self.weights.n_bytes(half_bytes),
            workspace=workspace,
            n_slots=slots.count,
            n_ctx=slots.n_ctx,
            chunk=chunk,
            budget=self._budget(total_bytes),
        )

    def _budget(self, total_bytes: int | None) -> Budget | None:
        """KV budget of the engine; an embedding model has none."""
        if total_bytes is None or self.preset.kind is ServiceKind.EMBEDDING:
            return None
        return Budget(total_bytes, self.preset.prefix_cache.memory_budget_pct)


def excerpts() -> Path:
    """Folder of config excerpts that come with the presets."""
    return presets.builtin_folder() / "configs"


def of_preset(preset: Preset) -> Candidate:
    """Candidate of a resolved preset. Raises SetupError or Unsupported."""
    return _candidate(preset, model_files.find_model(preset.model, excerpts()))


def named(wanted: str, home: Home, over: list[Override]) -> Candidate:
    """Candidate of a preset's name or file, a model folder, or a config.json.

    Raises SetupError.
    """
    path = Path(wanted).expanduser()
    is_model = path.suffix == ".json" or (path / model_files.CONFIG).is_file()
    if not is_model:
        return of_preset(presets.load(wanted, home, over).preset)
    files = model_files.read_config(path)
    name = path.absolute().name if path.is_dir() else path.absolute().parent.name
    alone = Preset(model=ModelSpec(id=str(path.absolute())), name=name)
    return _candidate(alone, files)


def _candidate(preset: Preset, files: ModelFiles) -> Candidate:
    is_measured = files.weights is not None
    found = files.weights or weight_size.estimate(files.config)
    return Candidate(preset, files, found, is_measured)


def shipped(home: Home) -> list[Candidate]:
    """One candidate for each chat model that the presets name, the embedded one left out.

    Presets that cannot be read, and models of which nothing is known, are passed over.
    """
    found: dict[str, Candidate] = {}
    for name in sorted(presets.listed(home)):
        try:
            preset = presets.load(name, home).preset
            if preset.kind is ServiceKind.CHAT and preset.model.id not in {*found, BUILTIN_MODEL}:
                found[preset.model.id] = of_preset(preset)
        except (SetupError, BadRequest):
            continue
    return list(found.values())
