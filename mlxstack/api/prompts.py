"""Prompts of a body: texts, token ids, images; their length."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.core.image import MediaText
from mlxstack.service.service import Service
from mlxstack.text.images.reader import ImageReader


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """Text part of llama-server's prompt object."""

    text: str


class PromptObject(Struct, frozen=True):
    """llama-server's prompt as an object: text with images, or text parts."""

    prompt_string: str | None = None
    content: list[TextPart] | None = None
    multimodal_data: list[Any] | None = None


Prompts = str | PromptObject | list[str | int | list[int | str] | PromptObject]
TextPrompt = str | tuple[int | str, ...]
Prompt = TextPrompt | MediaText
"""One prompt: a text, token ids and texts in a row, or a text with images."""


def read_prompts(sent_prompts: Prompts, param: str = "prompt") -> tuple[Prompt, ...]:
    """One prompt or several, each of text, token ids, or both.

    As for llama-server, a list that holds a token id is one prompt. Raises BadRequest for an empty
    list.
    """
    if not isinstance(sent_prompts, list):
        return (_prompt(sent_prompts, param),)
    pieces = tuple(piece for piece in sent_prompts if isinstance(piece, str | int))
    has_ids = any(isinstance(piece, int) for piece in pieces)
    if not sent_prompts or (has_ids and len(pieces) < len(sent_prompts)):
        raise BadRequest(
            f"{param} must be text, token ids, or a list of texts or of lists of token ids", param
        )
    if has_ids:
        return (pieces,)
    return tuple(_prompt(prompt, param) for prompt in sent_prompts)


def text_prompts(sent_prompts: Prompts, param: str) -> tuple[TextPrompt, ...]:
    """Prompts without images. Raises BadRequest."""
    all_prompts = read_prompts(sent_prompts, param)
    texts = tuple(prompt for prompt in all_prompts if not isinstance(prompt, MediaText))
    if len(texts) < len(all_prompts):
        raise BadRequest("multimodal_data is not supported; this model reads text only", param)
    return texts


def _prompt(prompt: str | int | list[int | str] | PromptObject, param: str) -> Prompt:
    assert not isinstance(prompt, int)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return tuple(prompt)
    if prompt.multimodal_data:
        return MediaText(prompt.prompt_string or "", tuple(prompt.multimodal_data))
    if prompt.prompt_string is not None:
        return prompt.prompt_string
    if prompt.content is None:
        raise BadRequest(f"an object in {param} needs prompt_string or content", param)
    return "".join(part.text for part in prompt.content)


async def n_prompt_tokens(service: Service, convert: Callable[[ImageReader], Conversation]) -> int:
    """Number of prompt tokens of a body."""
    text_processor = service.text_processor
    return len((await text_processor.prompt(await text_processor.read(convert))).tokens)
