"""Bounds of images, checked before anything is decoded, and their pixels.

A refusal is deterministic, so that a conversation with a refused image keeps its prompt.
"""

import hashlib
import threading
import warnings
from collections import OrderedDict
from io import BytesIO
from typing import Any

MAX_BYTES = 8 * 1024 * 1024
MAX_SIDE = 8000
MAX_PIXELS = 40_000_000
_MOST_KNOWN = 4096
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF"))
_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Turns by EXIF orientation, under Pillow's names."""
_decoding = threading.Lock()
_known: OrderedDict[bytes, tuple[int, int] | str] = OrderedDict()


class RefusedImage(ValueError):
    """An image outside the bounds, or broken; says what was measured."""


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of an upright image. Raises RefusedImage.

    An image is decoded once, to find whether it is whole; later calls cost a hash.
    """
    if len(data) > MAX_BYTES:
        raise RefusedImage(f"it has {len(data)} bytes, at most {MAX_BYTES} are taken")
    key = hashlib.sha256(data).digest()
    # One at a time: a decoded image takes up to 160 MB.
    with _decoding:
        found = _known.get(key)
        if found is None:
            try:
                found = decoded(data).size
            except RefusedImage as refusal:
                found = str(refusal)
            _known[key] = found
            if len(_known) > _MOST_KNOWN:
                _known.popitem(last=False)
    if isinstance(found, str):
        raise RefusedImage(found)
    return found


def decoded(data: bytes) -> Any:
    """Upright RGB Pillow image, transparency over white. Raises RefusedImage."""
    from PIL import Image  # noqa: PLC0415

    image = _opened(data)
    rotation = _TURNS.get(_orientation(image))
    try:
        image.load()
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, MemoryError) as why:
        raise RefusedImage(f"it is broken: {why}") from why
    image = _in_rgb(image)
    return image if rotation is None else image.transpose(Image.Transpose[rotation])


def _opened(data: bytes) -> Any:
    """Image whose header was read. Raises RefusedImage."""
    from PIL import Image  # noqa: PLC0415

    kind = next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "WEBP"
    if kind is None:
        raise RefusedImage("it is no PNG, JPEG, WebP or GIF; send PNG")
    try:
        with warnings.catch_warnings():
            # The bound of pixels below is stricter than the one that Pillow warns of.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=[kind])
    except Image.DecompressionBombError as why:
        raise RefusedImage(
            f"it is too large: {why}; at most {MAX_PIXELS} pixels are taken"
        ) from why
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, MemoryError) as why:
        raise RefusedImage("its header is broken") from why
    width, height = image.size
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise RefusedImage(
            f"it is {width} x {height} pixels; at most {MAX_SIDE} a side and {MAX_PIXELS} in all "
            "are taken"
        )
    return image


def _orientation(image: Any) -> int:
    """EXIF orientation from the header, without decoding."""
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError):
        return 1


def _in_rgb(image: Any) -> Any:
    from PIL import Image  # noqa: PLC0415

    if image.mode.startswith("I"):
        # Pillow would clip 16 bits to 8.
        image = image.convert("I").point(lambda level: level / 256).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
