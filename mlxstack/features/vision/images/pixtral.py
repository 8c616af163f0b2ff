"""Image processor of Mistral 3, whose tower is Pixtral's."""

import math
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.images.checkpoint import VisionFiles, check_patch, convert
from mlxstack.features.vision.images.scaling import Channels, bounded, normalized

PLACEHOLDER = "[IMG]"
END_OF_ROW = "[IMG_BREAK]"
END = "[IMG_END]"
NAME = "pixtral"
NEEDED: tuple[str, ...] = (
    "vision_tower.patch_conv.",
    "vision_tower.transformer.",
    "multi_modal_projector.linear_2.",
)
"""Beginnings of the names of tensors without which nothing is served."""
VERSION = 1
"""Of this file: another version gives other pixels, sizes or tokens."""


class LongestEdge(Struct, frozen=True):
    """Bound of both sides in pixels."""

    longest_edge: Annotated[int, Meta(ge=1, le=1 << 16)] = 1540


class PixtralSettings(Struct, frozen=True):
    """preprocessor_config.json, as far as it is read."""

    size: LongestEdge = LongestEdge()
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: Channels = (0.26862954, 0.26130258, 0.27577711)


class PixtralProcessor(Struct, frozen=True):
    """`ImageProcessor` of one checkpoint.

    `patch` is the side of a patch in pixels; `merge` x `merge` patches make a feature.
    """

    placeholder: ClassVar[str] = PLACEHOLDER
    written: ClassVar[str] = PLACEHOLDER
    framed: ClassVar[str] = PLACEHOLDER

    patch: int
    merge: int
    settings: PixtralSettings
    max_pixels: int
    tower: str

    @property
    def fingerprint(self) -> str:
        """Family, parameters, code version and weights of the tower, as text."""
        mean = self.settings.image_mean
        std = self.settings.image_std
        return f"pixtral {VERSION} {self.patch}x{self.merge} {mean} {std} {self.tower}"

    def size(self, width: int, height: int, detail: str = "auto") -> ImageSize:
        """Multiples of a feature's side, bounded size rounded up."""
        width, height = bounded(width, height, detail)
        side = self.patch * self.merge
        edge = self.settings.size.longest_edge
        ratio = max(1.0, width / edge, height / edge)
        columns = math.ceil(max(1, math.floor(width / ratio)) / side)
        rows = math.ceil(max(1, math.floor(height / ratio)) / side)
        excess = math.sqrt(max(1.0, columns * rows * side**2 / self.max_pixels))
        columns = max(1, int(columns / excess))
        rows = max(1, int(rows / excess))
        return ImageSize(columns * side, rows * side, rows=rows, columns=columns)

    def expand(self, size: ImageSize) -> tuple[str | None, ...]:
        """Features by rows, with a token after each row."""
        row: tuple[str | None, ...] = (*(None,) * size.columns, END_OF_ROW)
        return (*(row * size.rows)[:-1], END)

    def pixels(self, image: Any, size: ImageSize) -> Any:
        """Patches (n, 3 * patch * patch) by rows."""
        array = normalized(image, size, self.settings.image_mean, self.settings.image_std)
        grid = array.reshape(3, size.rows * self.merge, self.patch, -1, self.patch)
        return grid.transpose(1, 3, 0, 2, 4).reshape(-1, 3 * self.patch * self.patch)


def processor(files: VisionFiles, max_pixels: int) -> PixtralProcessor:
    """Processor of a checkpoint. Raises SetupError."""
    patch = files.vision_config.get("patch_size", 14)
    merge = files.config.get("spatial_merge_size", 2)
    check_patch(patch, merge)
    settings = convert(files, PixtralSettings)
    return PixtralProcessor(patch, merge, settings, max_pixels, files.fingerprint)


def n_parameters(config: dict[str, Any]) -> int:
    """Parameters of the tower that config.json tells of. Raises KeyError, TypeError."""
    vision = config["vision_config"]
    out = config["text_config"]["hidden_size"]
    n = vision["hidden_size"]
    wide = vision["intermediate_size"]
    patches = n * (vision.get("num_channels", 3) * vision.get("patch_size", 14) ** 2 + 1)
    block = 4 * n * n + 3 * n * wide + 2 * n
    merger = n * n * config.get("spatial_merge_size", 2) ** 2
    biases = 2 * out if config.get("multimodal_projector_bias") else 0
    projector = n + merger + n * out + out * out + biases
    return int(patches + vision["num_hidden_layers"] * block + projector)
