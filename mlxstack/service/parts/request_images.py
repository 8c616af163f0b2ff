"""Seam of the images of requests: read, checked, placed."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from mlxstack.core.conversation import Conversation
from mlxstack.core.image import MediaText
from mlxstack.text.images.reader import ImageReader
from mlxstack.text.tokens.cached_tokenizer import Splice

T = TypeVar("T")


class Run(Protocol):
    """Runs a job in a thread for prompts."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class RequestImages(Protocol):
    """Images of the requests to one model."""

    @property
    def accepts_images(self) -> bool:
        """Whether engine, template and processor take images."""

    async def read(self, run: Run, convert: Callable[[ImageReader], T]) -> T:
        """Result of `convert`, which `run` runs in a thread."""

    async def prepare(self, conversation: Conversation) -> None:
        """Check the images of a conversation. Raises BadRequest, Busy."""

    async def placed(self, run: Run, prompt: MediaText) -> tuple[str, Sequence[Splice]]:
        """A raw text with placeholders for its images, and their splices. Raises BadRequest."""
