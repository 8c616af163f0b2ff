"""Images of a request as clients send them, in every dialect."""

import base64
import binascii
import re
from typing import Any

from mlxstack.core.errors import BadRequest
from mlxstack.core.image import ImagePart
from mlxstack.text.images.bounds import (
    MAX_BYTES,
    MAX_PIXELS_IN_ALL,
    RefusedImage,
    known_measure,
    upright_size,
)

MAX_NEW = 20
MAX_IN_ALL = 100
OMITTED = "[image omitted]"
KINDS = frozenset({"image", "image_url", "input_image"})
WAY_OUT = "send it as a data URL (data:image/png;base64,...)"
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,30}:", re.IGNORECASE)


class ImageReader:
    """Images of one request, counted. Single owner.

    A text model takes none. One that `defers` takes images that were never decoded, and lists all
    in `unmeasured`: the caller has them measured, and reads again.
    """

    def __init__(
        self, *, accepts_images: bool = False, most_new: int = MAX_NEW, defers: bool = False
    ) -> None:
        self.accepts_images = accepts_images
        self.unmeasured: list[bytes] = []
        self._defers = defers
        self._most_new = most_new
        self._n_new = 0
        self._n_in_all = 0
        self._n_pixels = 0

    def new(self, part: dict[str, Any], path: str) -> ImagePart:
        """Image that the user sends now.

        Raises BadRequest with the path of the field.
        """
        if self._n_new >= self._most_new or self._n_in_all >= MAX_IN_ALL:
            raise BadRequest(
                f"{path}: more than {self._most_new} new images, or {MAX_IN_ALL} in all; "
                "send fewer",
                path,
            )
        self._n_new += 1
        try:
            return self._read(part)
        except RefusedImage as refusal:
            raise BadRequest(f"{path}: the image is refused: {refusal}", path) from None

    def earlier(self, part: dict[str, Any]) -> ImagePart | str:
        """Image of a history or tool result, or a note."""
        if self._n_in_all >= MAX_IN_ALL:
            return f"[image omitted: a request has at most {MAX_IN_ALL}]"
        try:
            return self._read(part)
        except RefusedImage as refusal:
            return f"[image omitted: {refusal}]"

    def _read(self, part: dict[str, Any]) -> ImagePart:
        detail = _detail(part)
        data = _bytes(part)
        if self._defers and known_measure(data) is None:
            self.unmeasured.append(data)
        else:
            self._add_pixels(*upright_size(data))
        self._n_in_all += 1
        return ImagePart(data, detail)

    def _add_pixels(self, width: int, height: int) -> None:
        """Count the pixels of an image. Raises BadRequest."""
        self._n_pixels += width * height
        check_pixels(self._n_pixels)


def check_pixels(n_pixels: int) -> None:
    """Raise BadRequest for too many pixels in a request's images."""
    if n_pixels > MAX_PIXELS_IN_ALL:
        raise BadRequest(
            f"messages: the images of this request have {n_pixels} pixels or more, at most "
            f"{MAX_PIXELS_IN_ALL} in all are taken; send fewer or smaller ones",
            "messages",
        )


TEXT_ONLY = ImageReader()
"""Reader of a text model: it takes no images."""


def _bytes(part: dict[str, Any]) -> bytes:
    """Encoded bytes of a part. Raises RefusedImage."""
    data = _sent(part)
    if data is None:
        if part.get("file_id") or _source(part).get("type") == "file":
            raise RefusedImage(f"no files are stored here; {WAY_OUT}")
        raise RefusedImage(f"it has no data; {WAY_OUT}")
    head = _DATA_URL.match(data)
    if head is None and _SCHEME.match(data):
        raise RefusedImage(f"nothing is fetched from addresses; {WAY_OUT}")
    text = data[head.end() :] if head else data
    if len(text) > MAX_BYTES * 3 // 2:
        raise RefusedImage(f"it has {len(text) * 3 // 4} bytes, at most {MAX_BYTES} are taken")
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError):
        raise RefusedImage("its data is no base64") from None


def _sent(part: dict[str, Any]) -> str | None:
    source = _source(part)
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    texts = (url, source.get("data"), source.get("url"), part.get("data"), part.get("url"))
    return next((text for text in texts if isinstance(text, str) and text), None)


def _source(part: dict[str, Any]) -> dict[str, Any]:
    source = part.get("source")
    return source if isinstance(source, dict) else {}


def _detail(part: dict[str, Any]) -> str:
    image_url = part.get("image_url")
    source = image_url if isinstance(image_url, dict) else part
    detail = source.get("detail")
    if detail in ("low", "high", "original"):
        return str(detail)
    return "auto"
