"""Image encoder: pixels from threads, features by steps of a tower."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest
from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import KVSpec
from mlxstack.core.prompt_tokens import ImageSpan, text_tokens, whole_images, without_virtual
from mlxstack.core.request import Request, with_image_ends
from mlxstack.engine.device import has_gpu
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.runner import SlotTokens
from mlxstack.engine.model.token_inputs import PLAIN_TOKENS
from mlxstack.features.vision.towers.loading import load_tower
from mlxstack.features.vision.towers.seam import ImageModel, image_model
from mlxstack.features.vision.towers.tower import Encoding, Features, VisionTower
from mlxstack.models.model_files import processor_of, vision_weights
from mlxstack.policy.memory.capacity import PLAIN_BITS
from mlxstack.policy.scheduling.chunked_prefill import steps_within
from mlxstack.text.images.bounds import RefusedImage, pixels_of

IMAGE_KV_VERSION = "2"
"""Moves with the names of images in block keys, and with faults in their KV."""
ENDS_WITH_IMAGE = "the prompt ends with an image; text must follow it"
MAX_BYTES = 256 << 20
"""Bytes of features that are kept; those of the last image always are."""
N_THREADS = 2
WAIT_S = 0.05
"""Seconds to wait for pixels while no request decodes."""


class ImageEncoder:
    """Inputs of a vision model: image features, by digest.

    The tower is loaded for the first image. MLX thread only.
    """

    def __init__(self, vision_model: ImageModel, folder: Path, processor: ImageProcessor) -> None:
        self.image_model = vision_model
        self._folder = folder
        self._processor = processor
        self._pool = ThreadPoolExecutor(N_THREADS, "image")
        self._tower: VisionTower | None = None
        self._pixels: dict[bytes, Future[Any]] = {}
        self._encodings: dict[bytes, Encoding] = {}
        self._features: OrderedDict[bytes, Features] = OrderedDict()
        self._needed_by: dict[bytes, set[str]] = {}
        self._step_s = 0.0
        self.n_encodes = 0
        self.n_prefilled = 0
        """Tokens of images in prefill chunks."""

    @property
    def n_bytes(self) -> int:
        """Bytes of pixels, encodings and features."""
        pixels = sum(
            int(future.result().nbytes) for future in self._pixels.values() if _is_ready(future)
        )
        encodings = sum(encoding.n_bytes for encoding in self._encodings.values())
        return pixels + encodings + self._n_feature_bytes

    @property
    def placeholder(self) -> int:
        """Token of the vocabulary in place of each feature."""
        return self.image_model.placeholder

    @property
    def counters(self) -> Mapping[str, int]:
        """As `TokenInputs.counters`."""
        return {"n_image_encodes": self.n_encodes, "n_image_tokens": self.n_prefilled}

    @property
    def stalled(self) -> set[str]:
        """Requests that wait for the pixels of an image."""
        waiting = (name for name, pixels in self._pixels.items() if not pixels.done())
        return set().union(*(self._needed_by.get(name, ()) for name in waiting))

    @property
    def _n_feature_bytes(self) -> int:
        return sum(features.n_bytes for features in self._features.values())

    def with_checkpoints(self, request: Request) -> Request:
        """The request with a checkpoint at the end of each image."""
        return with_image_ends(request) if request.images else request

    def text(self, request: Request) -> Sequence[int]:
        """Tokens of the prompt without those of images."""
        return text_tokens(request.tokens) if request.images else request.tokens

    def vocabulary_ids(self, tokens: Iterable[int]) -> list[int]:
        """Tokens with the placeholder for each feature."""
        return without_virtual(tokens, self.placeholder)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """End of a chunk, with an image at the latest. Raises BadRequest.

        Images whose tokens all attend to each other are not cut.
        """
        ends = (image.end for image in request.images if start < image.end < end)
        end = min(ends, default=end)
        if self.image_model.is_bidirectional:
            end = whole_images(request.images, start, end)
            if end == len(request.tokens):
                raise BadRequest(ENDS_WITH_IMAGE)
        return end

    def prepare(self, request: Request, start: int, end: int, seconds: float) -> bool:
        """Whether features of a chunk are known; else as `work`."""
        for image in _touched(request, start, end):
            if not self.has(image):
                self.work(request.id, image, seconds)
                return self.has(image)
        return True

    def shift(self, request: Request) -> int:
        """As `TokenInputs.shift`. Raises BadRequest."""
        if request.tokens[-1] >= FIRST_VIRTUAL:
            raise BadRequest(ENDS_WITH_IMAGE)
        return self.image_model.shift(request.images, len(request.tokens))

    def note_prefilled(self, request: Request, end: int) -> None:
        """Release the images of a request at the end of one."""
        if any(image.end == end for image in request.images):
            self.release(request.id)

    def drop(self) -> None:
        """Forget features that no prompt needs now."""
        for name in self._features.keys() - self._needed_by.keys():
            del self._features[name]

    def release(self, request_id: str) -> None:
        """Forget a request's need of images; end work for it alone."""
        for name, requests in list(self._needed_by.items()):
            requests.discard(request_id)
            if not requests:
                del self._needed_by[name]
                self._encodings.pop(name, None)
                if (pixels := self._pixels.pop(name, None)) is not None:
                    pixels.cancel()

    def has(self, image: ImageSpan) -> bool:
        """Whether the features are known."""
        return image.digest in self._features

    def work(self, request_id: str, image: ImageSpan, seconds: float) -> None:
        """Encode for about `seconds`, one step at least. Raises BadRequest, SetupError.

        The image is kept until `release`. Without seconds pixels are not waited for.
        """
        self._needed_by.setdefault(image.digest, set()).add(request_id)
        encoding = self._encodings.get(image.digest) or self._begin(image, seconds)
        if encoding is None:
            return
        n_steps = steps_within(seconds, self._step_s)
        began = time.perf_counter()
        is_complete = encoding.advance(n_steps)
        # Images differ in size: the next one begins with one step again.
        self._step_s = 0.0 if is_complete else (time.perf_counter() - began) / n_steps
        if is_complete:
            assert encoding.features is not None
            del self._encodings[image.digest]
            self._features[image.digest] = encoding.features
            self.n_encodes += 1
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop features beyond the bound; a chunk may need several."""
        for name in [name for name in self._features if name not in self._needed_by]:
            if self._n_feature_bytes <= MAX_BYTES:
                return
            del self._features[name]

    def slot_tokens(self, caches: list[Any], request: Request, start: int, end: int) -> SlotTokens:
        """Tokens of a chunk for a pass; its images are encoded."""
        if not request.images:
            return PLAIN_TOKENS.slot_tokens(caches, request, start, end)
        touched = _touched(request, start, end)
        for image in touched:
            self._features.move_to_end(image.digest)
            self.n_prefilled += min(end, image.end) - max(start, image.start)
        parts = [self._part(image, start, end) for image in touched]
        tokens = request.tokens[start:end]
        return self.image_model.slot_tokens(caches, tokens, start, request.images, parts)

    def _part(self, image: ImageSpan, start: int, end: int) -> Features:
        """Features of an image among the tokens `[start, end)`."""
        is_feature = [text is None for text in self._processor.expand(image.size)]
        first = sum(is_feature[: max(0, start - image.start)])
        return self._features[image.digest].part(first, sum(is_feature[: end - image.start]))

    def _begin(self, image: ImageSpan, seconds: float) -> Encoding | None:
        """Encoding of an image; None while its pixels are not decoded."""
        pixels = self._pixels.get(image.digest)
        if pixels is None:
            pixels = self._pixels[image.digest] = self._pool.submit(self._decode, image)
        wait([pixels], min(seconds, WAIT_S))
        if not pixels.done():
            return None
        del self._pixels[image.digest]
        if self._tower is None:
            self._tower = load_tower(self._folder)
            assert self._tower is not None
        self._encodings[image.digest] = Encoding(self._tower, pixels.result(), image.size)
        return self._encodings[image.digest]

    def _decode(self, image: ImageSpan) -> Any:
        try:
            return pixels_of(self._processor, image.data, image.size)
        except RefusedImage as error:
            raise BadRequest(f"messages: an image is refused: {error}", "messages") from error


def with_images(loaded: LoadedModel, kv: KVSpec) -> LoadedModel:
    """A loaded model that takes images, if its files have a tower. Raises SetupError."""
    folder = Path(loaded.facts.path)
    processor = processor_of(folder)
    if processor is None:
        return loaded
    vision_model = image_model(loaded.model, load_config(folder))
    # KV is quantized from a position on that may be in the middle of an image.
    if vision_model is None or (vision_model.is_bidirectional and kv.bits < PLAIN_BITS):
        return loaded
    encoder = ImageEncoder(vision_model, folder, processor)
    return replace(loaded, facts=_with_images(loaded.facts, folder), inputs=encoder)


def _with_images(facts: ModelFacts, folder: Path) -> ModelFacts:
    n_bytes = vision_weights(folder).n_bytes(2 if has_gpu() else 4)
    kv_format = f"{facts.identity.kv_format} images {IMAGE_KV_VERSION}"
    return replace(
        facts,
        identity=replace(facts.identity, kv_format=kv_format),
        accepts_images=True,
        n_bytes=facts.n_bytes + n_bytes,
    )


def _touched(request: Request, start: int, end: int) -> list[ImageSpan]:
    """Images that have tokens among `[start, end)`."""
    return [image for image in request.images if image.start < end and start < image.end]


def _is_ready(pixels: Future[Any]) -> bool:
    return pixels.done() and not pixels.cancelled() and pixels.exception() is None
