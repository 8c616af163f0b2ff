"""Bounds of images, checked before anything is decoded, and their pixels.

A refusal is deterministic, so that a conversation with a refused image keeps its prompt. Decoders
run in limited processes: a file may make one work for long.
"""

import hashlib
import pickle
import re
import threading
import warnings
from collections import OrderedDict
from io import BytesIO
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import Busy
from mlxstack.core.image import ImageSize
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.text.limited_pool import LimitedPool, PoolLimits
from mlxstack.text.limited_process import Overrun, Stalled

MAX_BYTES = 8 * 1024 * 1024
MAX_SIDE = 8000
MAX_PIXELS = 40_000_000
MAX_SCANS = 100
MAX_PIXELS_IN_ALL = 1_000_000_000
"""Pixels of all images of one request."""
MAX_SCANNED = 1_000_000_000
"""Pixels in all scans of a JPEG; a decoder passes over all of them for each scan."""
LIMIT_S = 5.0
"""CPU seconds to decode one image; 40 megapixels take one or two."""
_MAX_KNOWN = 4096
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
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
"""Marker of a JPEG that is no part of a scan."""
_END_OF_IMAGE = 0xD9
_START_OF_SCAN = 0xDA
_WITHOUT_LENGTH = frozenset({0x01, 0xD8})
PROCESSES = LimitedPool(
    "mlxstack.text.images.image_worker",
    PoolLimits(
        max_bytes=3 * 1024**3,
        quick_s=LIMIT_S,
        n_slow=1,
        n_idle=2,
        busy="an image takes long to decode; try again",
        max_answered=1024**3,
    ),
)
"""The processes that decode images."""

Measured = tuple[int, int] | str
"""Width and height of an upright image, or the reason why it is refused."""
_lock = threading.Lock()
_known: OrderedDict[bytes, Measured] = OrderedDict()


class RefusedImage(ValueError):
    """An image outside the bounds, or broken; says what was measured."""


class ImageJob(Struct, frozen=True):
    """Request to decode `data`, for its measure or its pixels.

    `is_header`: its header alone is read, and nothing decoded.
    """

    data: bytes
    is_header: bool = False
    processor: ImageProcessor | None = None
    size: ImageSize | None = None


class ImagePixels(Struct, frozen=True, tag=True):
    """Float32 array as bytes."""

    shape: tuple[int, ...]
    data: bytes


class ImageMeasure(Struct, frozen=True, tag=True):
    """Width and height of an upright image."""

    width: int
    height: int


class ImageRefusal(Struct, frozen=True, tag=True):
    """Reason why an image is refused."""

    reason: str


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of an upright image. Raises RefusedImage.

    An image is decoded once, to find whether it is whole; later calls cost a hash.
    """
    measured = known_measure(data) or measure(data, LIMIT_S)
    if isinstance(measured, str):
        raise RefusedImage(measured)
    return measured


def known_measure(data: bytes) -> Measured | None:
    """Known measure of an image, or of one with too many bytes."""
    if len(data) > MAX_BYTES:
        return f"it has {len(data)} bytes, at most {MAX_BYTES} are taken"
    with _lock:
        return _known.get(hashlib.sha256(data).digest())


def measure(data: bytes, limit_s: float) -> Measured:
    """Measure of an image, which is decoded within so many CPU seconds.

    Raises Overrun for a limit below `LIMIT_S`, and Busy.
    """
    try:
        answer = _answered(ImageJob(data), limit_s)
    except Overrun as overrun:
        if limit_s < LIMIT_S:
            raise
        answer = ImageRefusal(f"decoding it {overrun}")
    measured: Measured
    if isinstance(answer, ImageMeasure):
        measured = (answer.width, answer.height)
    else:
        assert isinstance(answer, ImageRefusal)
        measured = answer.reason
    with _lock:
        _known[hashlib.sha256(data).digest()] = measured
        if len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
    return measured


def n_header_pixels(data: bytes, limit_s: float) -> int:
    """Pixels of an image by its header; 0 for a refused one.

    Raises Overrun, Busy.
    """
    measured = known_measure(data)
    if measured is None:
        answer = _answered(ImageJob(data, is_header=True), limit_s)
        measured = (answer.width, answer.height) if isinstance(answer, ImageMeasure) else ""
    if isinstance(measured, str):
        return 0
    return measured[0] * measured[1]


def pixels_of(processor: ImageProcessor, data: bytes, size: ImageSize) -> Any:
    """Float32 input of a tower for an image of `size`.

    Raises RefusedImage, Busy.
    """
    import numpy as np  # noqa: PLC0415

    try:
        answer = _answered(ImageJob(data, processor=processor, size=size), LIMIT_S)
    except Overrun as overrun:
        raise RefusedImage(f"decoding it {overrun}") from None
    if isinstance(answer, ImageRefusal):
        raise RefusedImage(answer.reason)
    assert isinstance(answer, ImagePixels)
    return np.frombuffer(answer.data, np.float32).reshape(answer.shape)


def _answered(job: ImageJob, limit_s: float) -> ImagePixels | ImageMeasure | ImageRefusal:
    payload = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    try:
        data, _ = PROCESSES.request(payload, limit_s)
    except Stalled:
        raise Busy("an image was not decoded in time; try again") from None
    except OSError as error:
        raise Busy(f"images cannot be decoded now: {error.strerror}") from error
    answer: ImagePixels | ImageMeasure | ImageRefusal = msgspec.msgpack.decode(
        data, type=ImagePixels | ImageMeasure | ImageRefusal
    )
    return answer


def answer_of(job: ImageJob) -> ImagePixels | ImageMeasure | ImageRefusal:
    """Do a job, in a limited process."""
    try:
        if job.is_header:
            return ImageMeasure(*_opened(job.data).size)
        image = decoded(job.data)
        if job.processor is None or job.size is None:
            return ImageMeasure(*image.size)
        pixels = job.processor.pixels(image, job.size)
        return ImagePixels(pixels.shape, pixels.astype("float32", copy=False).tobytes())
    except RefusedImage as refusal:
        return ImageRefusal(str(refusal))


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
    if rotation is None:
        return image
    return image.transpose(Image.Transpose[rotation])


def image_format(data: bytes) -> str | None:
    """PNG, JPEG, GIF or WEBP by the first bytes, else None."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def _opened(data: bytes) -> Any:
    """Image whose header was read. Raises RefusedImage."""
    from PIL import Image  # noqa: PLC0415

    kind = image_format(data)
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
    if kind == "JPEG":
        _check_scans(data, width * height)
    return image


def _check_scans(data: bytes, n_pixels: int) -> None:
    """Raise RefusedImage for a JPEG whose scans take long to decode."""
    n_scans = offset = 0
    while (marker := _MARKER.search(data, offset)) and n_scans <= MAX_SCANS:
        code = marker[1][0]
        offset = marker.end()
        if code == _END_OF_IMAGE:
            break
        n_scans += code == _START_OF_SCAN
        if code not in _WITHOUT_LENGTH:
            offset += max(2, int.from_bytes(data[offset : offset + 2]))
    if n_scans > MAX_SCANS or n_scans * n_pixels > MAX_SCANNED:
        raise RefusedImage(
            f"it is a JPEG of {n_scans} scans over {n_pixels} pixels; at most {MAX_SCANS} scans, "
            f"and {MAX_SCANNED} pixels in all of them, are taken; send PNG"
        )


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
