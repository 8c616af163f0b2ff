"""Image processor of Gemma 4, which keeps the aspect ratio.

Transformers, image_processing_gemma4.py: https://github.com/huggingface/transformers
"""

import math
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.image import ImageSize
from mlxstack.features.vision.images.checkpoint import VisionFiles, check_patch, convert
from mlxstack.features.vision.images.scaling import BICUBIC, normalized

BEGIN = "<|image>"
PLACEHOLDER = "<|image|>"
END = "<image|>"
COUNTS = (70, 140, 280, 560, 1120)
"""Numbers of features that the models were trained with."""
N_BOUNDS = 7 * 4
"""Bounds of the clipped layers of a block."""
MIDDLE = (0.5, 0.5, 0.5)
NAME = "gemma4"
NEEDED: tuple[str, ...] = (
    "vision_tower.patch_embedder.",
    "vision_tower.encoder.",
    "embed_vision.embedding_projection.",
)
"""Beginnings of the names of tensors without which nothing is served."""
VERSION = 1
"""Of this file: another version gives other pixels, sizes or tokens."""


class Gemma4Settings(Struct, frozen=True):
    """preprocessor_config.json, as far as it is read."""

    max_soft_tokens: Annotated[int, Meta(ge=1, le=COUNTS[-1])] = 280
    resample: int = BICUBIC


class Gemma4Processor(Struct, frozen=True):
    """`ImageProcessor` of one checkpoint.

    `patch` is the side of a patch in pixels; `pool` x `pool` patches make a feature, and `longest`
    features a side at most.
    """

    placeholder: ClassVar[str] = PLACEHOLDER
    written: ClassVar[str] = PLACEHOLDER
    framed: ClassVar[str] = f"{BEGIN}{PLACEHOLDER}{END}"

    patch: int
    pool: int
    longest: int
    settings: Gemma4Settings
    max_pixels: int
    tower: str

    @property
    def fingerprint(self) -> str:
        """Family, parameters, code version and weights of the tower, as text."""
        return f"gemma4 {VERSION} {self.patch}x{self.pool} {self.settings.resample} {self.tower}"

    def size(self, width: int, height: int, detail: str = "auto") -> ImageSize:
        """The most features at its aspect ratio; small images grow."""
        side = self.patch * self.pool
        most = min(self._most(width * height, detail), max(1, self.max_pixels // side**2))
        factor = math.sqrt(most * side**2 / (width * height))
        rows = math.floor(factor * height / side)
        columns = math.floor(factor * width / side)
        if rows == 0:
            rows = 1
            columns = width // height
        elif columns == 0:
            rows = height // width
            columns = 1
        longest = min(most, self.longest)
        rows = min(rows, longest)
        columns = min(columns, longest)
        return ImageSize(columns * side, rows * side, rows=rows, columns=columns)

    def _most(self, n_pixels: int, detail: str) -> int:
        """Bound of features."""
        usual = self.settings.max_soft_tokens
        if detail == "low":
            return min(COUNTS[0], usual)
        if detail == "original":
            side = self.patch * self.pool
            enough = (n for n in COUNTS if n * side**2 >= n_pixels)
            return max(usual, next(enough, COUNTS[-1]))
        return usual

    def expand(self, size: ImageSize) -> tuple[str | None, ...]:
        """A feature each."""
        return (None,) * size.n_features

    def pixels(self, image: Any, size: ImageSize) -> Any:
        """Patches (n, patch * patch * 3) by rows."""
        array = normalized(image, size, MIDDLE, MIDDLE, self.settings.resample)
        grid = array.reshape(3, size.rows * self.pool, self.patch, -1, self.patch)
        return grid.transpose(1, 3, 2, 4, 0).reshape(-1, self.patch * self.patch * 3)


def processor(files: VisionFiles, max_pixels: int) -> Gemma4Processor:
    """Processor of a checkpoint. Raises SetupError."""
    patch = files.vision_config.get("patch_size", 16)
    pool = files.vision_config.get("pooling_kernel_size", 3)
    check_patch(patch, pool)
    n_positions = files.vision_config.get("position_embedding_size", 10240)
    if not isinstance(n_positions, int) or n_positions < pool:
        raise SetupError(f"vision_config: {n_positions} positions are not served")
    settings = convert(files, Gemma4Settings)
    longest = n_positions // pool
    return Gemma4Processor(patch, pool, longest, settings, max_pixels, files.fingerprint)


def n_parameters(config: dict[str, Any]) -> int:
    """Parameters of the tower that config.json tells of. Raises KeyError, TypeError."""
    vision = config["vision_config"]
    out = config["text_config"]["hidden_size"]
    n, wide, n_heads = (
        vision[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = vision.get("head_dim", 64)
    n_values = 2 * head * (n_heads + (vision.get("num_key_value_heads") or n_heads))
    patches = n * (3 * vision.get("patch_size", 16) ** 2)
    positions = 2 * n * vision.get("position_embedding_size", 10240)
    block = n * (n_values + 3 * wide + 4) + 2 * head
    block += N_BOUNDS if vision.get("use_clipped_linears") else 0
    standard = 2 * n if vision.get("standardize") else 0
    layers = int(vision["num_hidden_layers"]) * block
    return int(patches + positions + layers + standard + n * out)
