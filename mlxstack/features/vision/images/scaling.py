"""Size policy and pixel values that the families share."""

from typing import Any

from mlxstack.core.image import ImageSize

LONG_EDGE = 1568
"""Pixels: a screenshot of code stays readable."""
LOW_EDGE = 512
"""Pixels of the long edge for `detail: low`."""

BILINEAR = 2
BICUBIC = 3
"""Pillow's numbers of filters."""

Channels = tuple[float, float, float]


def bounded(width: int, height: int, detail: str) -> tuple[int, int]:
    """Width and height that `detail` allows; `original` has no bound."""
    edge = {"low": LOW_EDGE, "original": max(width, height)}.get(detail, LONG_EDGE)
    scale = min(1.0, edge / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def normalized(
    image: Any, size: ImageSize, mean: Channels, std: Channels, resample: int = BICUBIC
) -> Any:
    """Float32 array (3, height, width) of a resized RGB image."""
    # Pillow and numpy are needed only for a new image.
    import numpy as np  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    if image.size != (size.width, size.height):
        image = image.resize((size.width, size.height), Image.Resampling(resample))
    array: Any = np.asarray(image, dtype=np.float32) * np.float32(1 / 255)
    array = (array - np.array(mean, np.float32)) / np.array(std, np.float32)
    return array.transpose(2, 0, 1)
