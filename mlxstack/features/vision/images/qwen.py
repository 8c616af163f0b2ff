"""Image processor of Qwen3-VL and Qwen3.5 to 3.8."""

import math
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.images.checkpoint import VisionFiles, check_patch, convert
from mlxstack.features.vision.images.scaling import Channels, bounded, normalized

PLACEHOLDER = "<|image_pad|>"
NAME = "qwen"
NEEDED: tuple[str, ...] = (
    "vision_tower.patch_embed.",
    "vision_tower.blocks.",
    "vision_tower.merger.",
)
"""Beginnings of the names of tensors without which nothing is served."""
VERSION = 1
"""Of this file: another version gives other pixels, sizes or tokens."""

Pixels = Annotated[int, Meta(ge=1, le=1 << 30)]


class PixelRange(Struct, frozen=True):
    """Least and most pixels of an image."""

    shortest_edge: Pixels = 256 * 256
    longest_edge: Pixels = 4096 * 4096


class Settings(Struct, frozen=True):
    """preprocessor_config.json; older ones have `min_pixels` and `max_pixels`."""

    size: PixelRange = PixelRange()
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    image_mean: Channels = (0.5, 0.5, 0.5)
    image_std: Channels = (0.5, 0.5, 0.5)


class QwenProcessor(Struct, frozen=True):
    """`ImageProcessor` of one checkpoint.

    `patch` is the side of a patch in pixels; `merge` x `merge` patches make a feature.
    """

    placeholder: ClassVar[str] = PLACEHOLDER
    framed: ClassVar[str] = f"<|vision_start|>{PLACEHOLDER}<|vision_end|>"
    written: ClassVar[str] = framed

    patch: int
    merge: int
    settings: Settings
    max_pixels: int
    tower: str

    @property
    def fingerprint(self) -> str:
        """Family, parameters, code version and weights of the tower, as text."""
        mean = self.settings.image_mean
        std = self.settings.image_std
        return f"qwen {VERSION} {self.patch}x{self.merge} {mean} {std} {self.tower}"

    def size(self, width: int, height: int, detail: str = "auto") -> ImageSize:
        """Multiples of a feature's side near the bounded size."""
        width, height = bounded(width, height, detail)
        most = min(self.settings.max_pixels or self.settings.size.longest_edge, self.max_pixels)
        least = min(self.settings.min_pixels or self.settings.size.shortest_edge, most)
        width, height = smart_resize(width, height, self.patch * self.merge, least, most)
        side = self.patch * self.merge
        return ImageSize(width, height, rows=height // side, columns=width // side)

    def expand(self, size: ImageSize) -> tuple[str | None, ...]:
        """A feature each."""
        return (None,) * size.n_features

    def pixels(self, image: Any, size: ImageSize) -> Any:
        """Patches (n, 3 * patch * patch), those of a feature together."""
        array = normalized(image, size, self.settings.image_mean, self.settings.image_std)
        side = (self.merge, self.patch)
        grid = array.reshape(3, size.rows, *side, size.columns, *side)
        patches = grid.transpose(1, 4, 2, 5, 0, 3, 6)
        return patches.reshape(-1, 3 * self.patch * self.patch)


def smart_resize(
    width: int, height: int, side: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Multiples of `side` near `width` and `height`, within a range of pixels.

    The rule of Qwen2-VL, except that no aspect ratio is refused.
    """
    wide = round(width / side) * side
    high = round(height / side) * side
    if wide * high > max_pixels:
        beta = math.sqrt(width * height / max_pixels)
        wide = max(side, math.floor(width / beta / side) * side)
        high = max(side, math.floor(height / beta / side) * side)
    elif wide * high < min_pixels:
        beta = math.sqrt(min_pixels / (width * height))
        wide = math.ceil(width * beta / side) * side
        high = math.ceil(height * beta / side) * side
    return wide, high


def processor(files: VisionFiles, max_pixels: int) -> QwenProcessor:
    """Processor of a checkpoint. Raises SetupError."""
    patch = files.vision_config.get("patch_size", 16)
    merge = files.vision_config.get("spatial_merge_size", 2)
    check_patch(patch, merge)
    return QwenProcessor(patch, merge, convert(files, Settings), max_pixels, files.fingerprint)


def n_parameters(config: dict[str, Any]) -> int:
    """Parameters of the tower that config.json tells of. Raises KeyError, TypeError."""
    vision = config["vision_config"]
    n, wide, out = (vision[key] for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    merged = n * vision.get("spatial_merge_size", 2) ** 2
    values = vision.get("in_channels", 3) * vision.get("patch_size", 16) ** 2
    patches = n * (vision.get("temporal_patch_size", 2) * values + 1)
    block = 4 * n * (n + 1) + 2 * n * wide + wide + n + 4 * n
    merger = merged * (merged + 1) + (merged + 1) * out
    mergers = 2 * n + merger
    mergers += len(vision.get("deepstack_visual_indexes") or ()) * (2 * merged + merger)
    positions = n * vision.get("num_position_embeddings", 2304)
    return int(patches + positions + vision["depth"] * block + mergers)
