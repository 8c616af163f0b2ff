"""Image processor of Gemma 3: squares of one size, whatever the image."""

import math
from typing import Any, ClassVar

from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.image import ImageSize
from mlxstack.features.vision.images.checkpoint import VisionFiles, check_patch, convert
from mlxstack.features.vision.images.scaling import BILINEAR, Channels, normalized

BEGIN = "<start_of_image>"
PLACEHOLDER = "<image_soft_token>"
END = "<end_of_image>"
NAME = "gemma3"
NEEDED: tuple[str, ...] = (
    "vision_tower.embeddings.patch_embedding.",
    "vision_tower.encoder.",
    "multi_modal_projector.mm_input_projection_weight",
)
"""Beginnings of the names of tensors without which nothing is served."""
VERSION = 1
"""Of this file: another version gives other pixels, sizes or tokens."""


class Gemma3Settings(Struct, frozen=True):
    """preprocessor_config.json, as far as it is read."""

    image_mean: Channels = (0.5, 0.5, 0.5)
    image_std: Channels = (0.5, 0.5, 0.5)
    resample: int = BILINEAR


class Gemma3Processor(Struct, frozen=True):
    """`ImageProcessor` of one checkpoint.

    An image is scaled to `edge` x `edge` pixels, in patches of side `patch`, and has `side` x
    `side` features.
    """

    placeholder: ClassVar[str] = PLACEHOLDER
    written: ClassVar[str] = BEGIN
    framed: ClassVar[str] = f"\n\n{BEGIN}{PLACEHOLDER}{END}\n\n"

    edge: int
    patch: int
    side: int
    settings: Gemma3Settings
    tower: str

    @property
    def fingerprint(self) -> str:
        """Family, parameters, code version and weights of the tower, as text."""
        mean = self.settings.image_mean
        std = self.settings.image_std
        scaled = f"{self.edge}/{self.patch} {self.settings.resample}"
        return f"gemma3 {VERSION} {scaled} {mean} {std} {self.tower}"

    def size(self, width: int, height: int, detail: str = "auto") -> ImageSize:
        """The same for every image."""
        return ImageSize(self.edge, self.edge, rows=self.side, columns=self.side)

    def expand(self, size: ImageSize) -> tuple[str | None, ...]:
        """A feature each."""
        return (None,) * size.n_features

    def pixels(self, image: Any, size: ImageSize) -> Any:
        """Patches (n, 3 * patch * patch) by rows."""
        settings = self.settings
        array = normalized(image, size, settings.image_mean, settings.image_std, settings.resample)
        grid = array.reshape(3, self.edge // self.patch, self.patch, -1, self.patch)
        return grid.transpose(1, 3, 0, 2, 4).reshape(-1, 3 * self.patch * self.patch)


def processor(files: VisionFiles, max_pixels: int) -> Gemma3Processor:
    """Processor of a checkpoint, which has one size of images. Raises SetupError."""
    del max_pixels
    edge, patch = (files.vision_config.get(key) for key in ("image_size", "patch_size"))
    n_features = files.config.get("mm_tokens_per_image", 256)
    if not (isinstance(edge, int) and isinstance(patch, int) and isinstance(n_features, int)):
        raise SetupError("config.json: image_size, patch_size or mm_tokens_per_image is missing")
    check_patch(patch, 1)
    side = math.isqrt(max(1, n_features))
    if not 0 < edge <= 4096 or edge % patch or (edge // patch) % side:
        raise SetupError(f"config.json: images of {edge} pixels in {side} features are not served")
    return Gemma3Processor(edge, patch, side, convert(files, Gemma3Settings), files.fingerprint)


def n_parameters(config: dict[str, Any]) -> int:
    """Parameters of the tower that config.json tells of. Raises KeyError, TypeError."""
    vision = config["vision_config"]
    out = config["text_config"].get("hidden_size", 2304)
    n, wide, patch = (vision[key] for key in ("hidden_size", "intermediate_size", "patch_size"))
    patches = n * (vision.get("num_channels", 3) * patch**2 + 1)
    positions = n * (vision["image_size"] // patch) ** 2
    block = 4 * n * (n + 1) + 2 * n * wide + wide + n + 4 * n
    projector = n * (out + 1)
    layers = vision["num_hidden_layers"] * block
    return int(patches + positions + layers + 2 * n + projector)
