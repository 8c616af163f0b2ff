"""Images in the prompts of one model."""

import re
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import SetupError
from mlxstack.core.image import MEDIA_MARKER, ImagePart
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.core.prompt_tokens import without_virtual
from mlxstack.features.vision.images.spans import (
    check_media,
    image_splices,
    images_of,
    moved_from_tools,
    without_images,
)
from mlxstack.text.images.marks import (
    MARK_CLOSES,
    MARK_OPENS,
    content_parts,
    mark_of,
    marks_in,
    with_own_marks,
)
from mlxstack.text.images.reader import OMITTED
from mlxstack.text.prompt.splicer import PromptSplicer, Scope
from mlxstack.text.template.chat_template import PROBE_CALL, ChatTemplate
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Splice

_IMAGE = mark_of(ImagePart(b""))
SHOWN_TO_USER = (Message(Role.USER, f"a{_IMAGE}b{_IMAGE}c"),)
SHOWN_BY_TOOL = (
    Message(Role.USER, "a"),
    PROBE_CALL,
    Message(Role.TOOL, f"b{_IMAGE}", tool_call_id="call00000", name="act"),
)
NO_TOOL_IMAGES = "[image omitted: the chat template of this model takes none in tool results]"
_ANY_MARK = re.compile(f"{MARK_OPENS}[^{MARK_OPENS}{MARK_CLOSES}]*{MARK_CLOSES}")


class ImageMarks:
    """Marks of images in the messages that a template shows."""

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor

    def parts(self, text: str) -> list[dict[str, Any]] | None:
        """Texts and images in order; None for a text without images."""
        if MARK_OPENS in text:
            return content_parts(text)
        return None

    def placed(self, rendering: str) -> str:
        """The rendering with framed placeholders."""
        return rendering.replace(self._processor.written, self._processor.framed)


class ImageSplicer(PromptSplicer):
    """Images in prompts, or notes in their place. Thread-safe.

    Raises SetupError for a tokenizer without the tokens that images need.
    """

    def __init__(
        self, encoder: CachedTokenizer, template: ChatTemplate, processor: ImageProcessor | None
    ) -> None:
        self._encoder = encoder
        self._template = template
        if processor is not None and not self._shows(processor, SHOWN_TO_USER, 2):
            processor = None
        self._processor = processor
        self._placeholder = 0 if processor is None else self._token_of(processor.placeholder)
        self._is_tool_shown = processor is not None and self._shows(processor, SHOWN_BY_TOOL, 1)

    @property
    def accepts_images(self) -> bool:
        """Whether template and processor take images."""
        return self._processor is not None

    def prepare(self, conversation: Conversation) -> Conversation:
        """Conversation whose images the template takes where they are."""
        if not any(MARK_OPENS in message.text for message in conversation.messages):
            return conversation
        conversation = with_own_marks(conversation)
        messages = conversation.messages
        if not any(message.images for message in messages):
            return conversation
        if self._processor is None:
            messages = without_images(messages, OMITTED, *Role)
        elif not self._is_tool_shown and self._template.capabilities.takes_user_after_tool:
            messages = moved_from_tools(messages)
        elif not self._is_tool_shown:
            messages = without_images(messages, NO_TOOL_IMAGES, Role.TOOL)
        return structs.replace(conversation, messages=messages)

    def text_runs(self, text: str) -> list[str]:
        """The texts between images."""
        if MARK_OPENS in text:
            return _ANY_MARK.split(text)
        return [text]

    def splices(
        self, scope: Scope, conversation: Conversation, adapted: Conversation, rendering: str
    ) -> Sequence[Splice]:
        """Images of a rendering in their order. Raises BadRequest."""
        if self._processor is None:
            return ()
        by_mark = images_of(conversation.messages)
        images = [
            by_mark[mark]
            for message in adapted.messages
            for mark in marks_in(message.text)
            if mark in by_mark
        ]
        return image_splices(self._processor, images, rendering, self._token_of)

    def vocabulary_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens with the placeholder in place of virtual ids."""
        if self._processor is None:
            return tokens
        return without_virtual(tokens, self._placeholder)

    def raw(self, text: str, images: Sequence[ImagePart]) -> tuple[str, Sequence[Splice]]:
        """A raw text with placeholders at its media markers, and their splices.

        Raises BadRequest for another number of images.
        """
        assert self._processor is not None
        check_media(text, images)
        written = text.replace(MEDIA_MARKER, self._processor.framed)
        return written, image_splices(self._processor, images, written, self._token_of)

    def _token_of(self, text: str) -> int:
        """Id of a special token. Raises SetupError."""
        ids = self._encoder.encode(text).tokens
        if len(ids) != 1:
            raise SetupError(f"the tokenizer has no token {text}, which images need")
        return ids[0]

    def _shows(self, processor: ImageProcessor, messages: Sequence[Message], n_images: int) -> bool:
        """Whether the template shows all images of a probe."""
        rendering = self._template.tried(messages, (), {})
        return rendering is not None and rendering.count(processor.placeholder) == n_images
