"""Loads vision towers from model folders."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx import nn
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.engine.device import has_gpu
from mlxstack.engine.vision import gemma3, gemma4, pixtral, qwen
from mlxstack.engine.vision.tower import VisionTower
from mlxstack.models.model_files import vision_files
from mlxstack.text.images.checkpoint import VisionFiles
from mlxstack.text.images.families import family_of

Weights = Iterable[tuple[str, mx.array]]


class Maker(Struct, frozen=True):
    """Configuration, module and weight names of a family."""

    config: type[Any]
    tower: Callable[[Any], VisionTower]
    named: Callable[[Weights, Any], dict[str, mx.array]]


MAKERS = {
    "qwen": Maker(qwen.QwenVision, qwen.QwenTower, qwen.named),
    "gemma3": Maker(gemma3.Gemma3Vision, gemma3.SiglipTower, gemma3.named),
    "gemma4": Maker(gemma4.Gemma4Vision, gemma4.Gemma4Tower, gemma4.named),
    "pixtral": Maker(pixtral.PixtralVision, pixtral.PixtralTower, pixtral.named),
}
"""By the name of the family in `mlxstack.text.images.families`."""


def load_tower(folder: Path) -> VisionTower | None:
    """Vision tower of the model in `folder`, if of a served family.

    Raises SetupError for settings or weights that do not fit.
    """
    files = vision_files(folder)
    family = None if files is None else family_of(files)
    if files is None or family is None:
        return None
    maker = MAKERS[family.NAME]
    try:
        # A configuration without `text_config` is itself that of the text model.
        settings = {"text_config": files.config, **files.config, **files.vision_config}
        config = msgspec.convert(settings, maker.config)
        tower = maker.tower(config)
        weights = maker.named(_read(files), config)
        _quantize(tower, weights, files.config)
        tower.load_weights(list(weights.items()))
    except (msgspec.ValidationError, ValueError, RuntimeError) as why:
        raise SetupError(f"the vision tower in {folder} cannot be loaded: {why}") from why
    if not has_gpu():
        tower.set_dtype(mx.float32)
    tower.fingerprint = files.fingerprint
    tower.eval()
    return tower


def _read(files: VisionFiles) -> Weights:
    """Vision tensors by our names, each file mapped once."""
    opened: dict[Path, Any] = {}
    for name, (file, own) in files.tensors.items():
        if file not in opened:
            opened[file] = mx.load(str(file))
        yield name, opened[file][own]


def _quantize(tower: VisionTower, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Quantize those layers whose scales are in the weights, as config.json says."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, dict):
        return
    own = {name: one for name, one in settings.items() if isinstance(one, dict)}
    shared = {key: settings[key] for key in ("group_size", "bits", "mode") if key in settings}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        return next((one for name, one in own.items() if name.endswith(f".{path}")), shared)

    nn.quantize(tower, class_predicate=chosen)
