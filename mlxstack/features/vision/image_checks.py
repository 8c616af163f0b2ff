"""Checks of the images of requests, one by one.

Those that take long have threads of their own, so that others do not wait for them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.core.image import ImagePart, MediaText
from mlxstack.features.vision.images.image_splicer import ImageSplicer
from mlxstack.service.parts.request_images import Run
from mlxstack.service.parts.work_threads import ThreadGroup
from mlxstack.text.images.bounds import LIMIT_S, known_measure, measure, n_header_pixels
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader, check_pixels
from mlxstack.text.limited_process import Overrun
from mlxstack.text.tokens.cached_tokenizer import Splice

T = TypeVar("T")

QUICK_S = 0.5
"""CPU seconds after which an image is tried again among the slow ones."""
REQUEST_S = 30.0
"""CPU seconds that the images of one request may take, each slow one counted as its limit."""
N_QUICK = 2
N_SLOW = 2


class ImageInputs:
    """`RequestImages` of a model, measured in limited processes.

    Those end when the client leaves.
    """

    def __init__(self, group: ThreadGroup, splicer: ImageSplicer) -> None:
        self._splicer = splicer
        self._quick = group.add(N_QUICK, "checks of images")
        self._slow = group.add(N_SLOW, "checks of slow images")

    @property
    def accepts_images(self) -> bool:
        """Whether engine, template and processor take images."""
        return self._splicer.accepts_images

    async def read(self, run: Run, convert: Callable[[ImageReader], T]) -> T:
        """Result of `convert`, which `run` runs in a thread.

        Images that were not seen before are decoded once, and it runs again.
        """
        if not self.accepts_images:
            return await run(lambda: convert(TEXT_ONLY))
        reader = ImageReader(accepts_images=True, defers=True)
        converted = await run(lambda: convert(reader))
        if not reader.unmeasured:
            return converted
        await self.measure(reader.unmeasured)
        return await run(lambda: convert(ImageReader(accepts_images=True)))

    async def prepare(self, conversation: Conversation) -> None:
        """Measure the images of a conversation. Raises BadRequest, Busy."""
        # Those of a stored history may not have been decoded since the start.
        images = [image.data for message in conversation.messages for image in message.images]
        if images:
            await self.measure(images)

    async def placed(self, run: Run, prompt: MediaText) -> tuple[str, Sequence[Splice]]:
        """A raw text with placeholders for its images, and their splices. Raises BadRequest."""
        if not self.accepts_images:
            raise BadRequest(
                "multimodal_data is not supported; this model reads text only", "prompt"
            )

        def images(reader: ImageReader) -> list[ImagePart]:
            return [
                reader.new({"data": data}, f"prompt.multimodal_data[{i}]")
                for i, data in enumerate(prompt.data)
            ]

        parts = await self.read(run, images)
        return await run(lambda: self._splicer.raw(prompt.text, parts))

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
