"""Images of a preset before its model is loaded."""

from contextlib import suppress

from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.image import ImageProcessor
from mlxstack.core.model_info import Weights
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.models.model_files import ModelFiles
from mlxstack.text.images.checkpoint import VisionFiles, vision_files
from mlxstack.text.images.families import FAMILIES, expected_files, family_of, why_not_served


class VisionPlan(Struct, frozen=True):
    """Weights of a served tower, and its processor.

    `why_not` tells why a model with a tower serves no images.
    """

    tower: Weights = Weights()
    processor: ImageProcessor | None = None
    why_not: str = ""

    def n_tokens(self, width: int, height: int) -> int:
        """Tokens of an image; 0 where no images are served."""
        if self.processor is None:
            return 0
        return len(self.processor.expand(self.processor.size(width, height)))


def vision_plan(preset: Preset, files: ModelFiles) -> VisionPlan:
    """Images of a preset, by files or by config.json.

    Raises SetupError for broken files.
    """
    if files.weights is None:
        with suppress(SetupError):
            return _served(preset, expected_files(files.config))
        return VisionPlan()
    found = vision_files(files.source.parent)
    if found is not None and found.config.get("model_type") in FAMILIES:
        found = None if family_of(found) is None else found
    return _served(preset, found)


def _served(preset: Preset, files: VisionFiles | None) -> VisionPlan:
    """Images of a preset whose model has a whole tower. Raises SetupError."""
    if files is None or preset.kind is ServiceKind.EMBEDDING:
        return VisionPlan()
    if preset.hosts:
        return VisionPlan(why_not="several machines serve no images")
    if why_not := why_not_served(files.config, preset.kv.bits):
        return VisionPlan(why_not=why_not)
    family = FAMILIES[str(files.config["model_type"])]
    return VisionPlan(files.weights, family.processor(files, preset.vision.max_pixels))
