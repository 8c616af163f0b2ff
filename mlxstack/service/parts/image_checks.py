"""Checks of the images of requests, one by one.

Those that take long have threads of their own, so that others do not wait for them.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from mlxstack.core.errors import BadRequest
from mlxstack.service.parts.work_threads import ThreadGroup
from mlxstack.text.images.bounds import LIMIT_S, known_measure, measure, n_header_pixels
from mlxstack.text.images.reader import check_pixels
from mlxstack.text.limited_process import Overrun

QUICK_S = 0.5
"""CPU seconds after which an image is tried again among the slow ones."""
REQUEST_S = 30.0
"""CPU seconds that the images of one request may take, each slow one counted as its limit."""
N_QUICK = 2
N_SLOW = 2


class ImageChecks:
    """Measures images in limited processes, which end when the client leaves."""

    def __init__(self, group: ThreadGroup) -> None:
        self._quick = group.add(N_QUICK, "checks of images")
        self._slow = group.add(N_SLOW, "checks of slow images")

    async def measure(self, images: Sequence[bytes]) -> None:
        """Measure images that are not known yet. Raises BadRequest, Busy."""
        unknown, n_pixels = await self._quick.run(partial(_unknown, images))
        for data in unknown:
            n_pixels += await self._quick.run(partial(_n_pixels, data))
            check_pixels(n_pixels)
        left_s = REQUEST_S
        for data in unknown:
            if left_s <= 0:
                raise BadRequest(
                    f"messages: the images of this request take more than {REQUEST_S:g} s to "
                    "decode; send fewer or smaller ones",
                    "messages",
                )
            left_s -= await self._measured(data)

    async def _measured(self, data: bytes) -> float:
        """CPU seconds that an image takes at most."""
        try:
            await self._quick.run(partial(measure, data, QUICK_S))
        except Overrun:
            await self._slow.run(partial(measure, data, LIMIT_S))
            return LIMIT_S
        return QUICK_S / 4


def _unknown(images: Iterable[bytes]) -> tuple[tuple[bytes, ...], int]:
    """Unknown images, each once, and the pixels of the others."""
    unknown: dict[bytes, None] = {}
    n_pixels = 0
    for data in images:
        measured = known_measure(data)
        if measured is None:
            unknown[data] = None
        elif not isinstance(measured, str):
            width, height = measured
            n_pixels += width * height
    return tuple(unknown), n_pixels


def _n_pixels(data: bytes) -> int:
    """Pixels of an image by its header; 0 for an overrun."""
    try:
        return n_header_pixels(data, QUICK_S)
    except Overrun:
        return 0
