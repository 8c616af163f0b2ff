"""Checks of the images of requests, one at a time for each request.

Those that take long have threads of their own, so that others do not wait for them.
"""

from collections.abc import Iterable

from mlxstack.core.errors import BadRequest
from mlxstack.service.parts.work_threads import WorkThreads
from mlxstack.text.images.bounds import LIMIT_S, known_measure, measure
from mlxstack.text.limited_process import Overrun

QUICK_S = 0.5
"""CPU seconds after which an image is tried again among the slow ones."""
REQUEST_S = 30.0
"""CPU seconds that the images of one request may take, each slow one counted as its limit."""
N_QUICK = 2
N_SLOW = 2


class ImageChecks:
    """Measures images in limited processes, which end when the client leaves."""

    def __init__(self) -> None:
        self._quick = WorkThreads(N_QUICK, "checks of images")
        self._slow = WorkThreads(N_SLOW, "checks of slow images")
        self.threads = (self._quick, self._slow)

    async def measure(self, images: Iterable[bytes]) -> None:
        """Measure images that are not known yet. Raises BadRequest, Busy."""
        left_s = REQUEST_S
        for data in dict.fromkeys(images):
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
            is_new = await self._quick.run(lambda: _is_new(data))
        except Overrun:
            await self._slow.run(lambda: measure(data, LIMIT_S))
            return LIMIT_S
        return QUICK_S / 4 if is_new else 0.0


def _is_new(data: bytes) -> bool:
    """Whether an image was not known, and has been measured now."""
    if known_measure(data) is not None:
        return False
    measure(data, QUICK_S)
    return True
