"""Loads vision towers from model folders."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx import nn

from mlxstack.core.errors import SetupError
from mlxstack.engine.device import has_gpu
from mlxstack.features.vision.images.checkpoint import VisionFiles
from mlxstack.features.vision.images.families import family_of
from mlxstack.features.vision.towers import gemma3, gemma4, pixtral, qwen
from mlxstack.features.vision.towers.tower import VisionTower
from mlxstack.models.model_files import vision_files

FAMILIES: dict[str, tuple[type[Any], type[VisionTower]]] = {
    "qwen": (qwen.QwenVision, qwen.QwenTower),
    "gemma3": (gemma3.Gemma3Vision, gemma3.SiglipTower),
    "gemma4": (gemma4.Gemma4Vision, gemma4.Gemma4Tower),
    "pixtral": (pixtral.PixtralVision, pixtral.PixtralTower),
}
"""Configuration and tower by the name of the family in `features.vision.images.families`."""


def load_tower(folder: Path) -> VisionTower | None:
    """Vision tower of the model in `folder`, if of a served family.

    Raises SetupError for settings or weights that do not fit.
    """
    files = vision_files(folder)
    family = None if files is None else family_of(files)
    if files is None or family is None:
        return None
    configuration, make = FAMILIES[family.NAME]
    try:
        # A configuration without `text_config` is itself that of the text model.
        settings = {"text_config": files.config, **files.config, **files.vision_config}
        tower = make(msgspec.convert(settings, configuration))
        weights = tower.arranged(_read(files))
        _quantize(tower, weights, files.config)
        tower.load_weights(list(weights.items()))
    except (msgspec.ValidationError, ValueError, RuntimeError) as error:
        raise SetupError(f"the vision tower in {folder} cannot be loaded: {error}") from error
    if not has_gpu():
        tower.set_dtype(mx.float32)
    tower.eval()
    return tower


def _read(files: VisionFiles) -> dict[str, mx.array]:
    """Vision tensors by the names of the tower, each file mapped once."""
    loaded = {file for file, _ in files.tensors.values()}
    opened: dict[Path, Any] = {file: mx.load(str(file)) for file in loaded}
    return {
        name.removeprefix("vision_tower."): opened[file][own]
        for name, (file, own) in files.tensors.items()
    }


def _quantize(tower: VisionTower, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Quantize those layers whose scales are in the weights, as config.json says."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, dict):
        return
    own = {name: entry for name, entry in settings.items() if isinstance(entry, dict)}
    shared = {key: settings[key] for key in ("group_size", "bits", "mode") if key in settings}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        return next((entry for name, entry in own.items() if name.endswith(f".{path}")), shared)

    nn.quantize(tower, class_predicate=chosen)
