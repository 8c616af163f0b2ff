"""Images of a preset: the tower that serves them, and its weights."""

from msgspec import Struct

from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.features.vision.images.checkpoint import VisionFiles
from mlxstack.features.vision.images.families import (
    FAMILIES,
    family_of,
    n_tower_parameters,
    why_not_served,
)
from mlxstack.models.model_files import ModelFiles, tower_weights, vision_files
from mlxstack.policy.memory.capacity import Weights


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
        expected = None
        if n_half:
            expected = VisionFiles(files.config, b"{}", {}, "")
        return _served(preset, expected, Weights(n_half=n_half))
    tensors = vision_files(files.source.parent)
    if tensors is None:
        return VisionPlan()
    if tensors.config.get("model_type") in FAMILIES and family_of(tensors) is None:
        return VisionPlan()
    return _served(preset, tensors, tower_weights(tensors))


def _served(preset: Preset, files: VisionFiles | None, tower: Weights) -> VisionPlan:
    """Images of a preset whose model has a whole tower."""
    if files is None or preset.kind is ServiceKind.EMBEDDING:
        return VisionPlan()
    if preset.hosts:
        return VisionPlan(why_not="several machines serve no images")
    if why_not := why_not_served(files.config, preset.kv.bits):
        return VisionPlan(why_not=why_not)
    return VisionPlan(files, tower, preset.vision.max_pixels)
