"""Converts bodies of Ollama's API to conversations."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from mlxstack.api.dialects.ollama.request_schema import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaMessage,
)
from mlxstack.api.dialects.openai_chat import to_conversation as openai_chat
from mlxstack.api.dialects.openai_chat.messages import AnyContent, ChatMessageParam, result_content
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.request_fields import refuse
from mlxstack.api.response_format import format_instruction
from mlxstack.core.conversation import Conversation, Role
from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader

DURATION = re.compile(r"(?<![\d.])(\d++(?:\.\d*+)?+|\.\d++)([mnu\u00b5]s|[hms]|\Z)")
UNITS_S = {
    "ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "": 1
}  # fmt: skip
LEVELS = ("low", "medium", "high", "max")


def chat_conversation(body: OllamaChatBody, images: ImageReader = TEXT_ONLY) -> Conversation:
    """Conversation of a chat. Raises BadRequest with the path of the field."""
    messages = _messages(body.messages or (), images)
    return _conversation(ChatBody(messages=messages, tools=body.tools), body, images)


def prompt_conversation(body: OllamaGenerateBody, images: ImageReader = TEXT_ONLY) -> Conversation:
    """Conversation of one prompt. Raises BadRequest for unsupported fields."""
    reason = "; send the messages to /api/chat, or with raw: true the whole prompt"
    refuse(body, ("suffix", "template", "context"), reason)
    messages = [ChatMessageParam("user", _content(body.prompt, body.images, images))]
    if body.system:
        messages.insert(0, ChatMessageParam("system", body.system))
    return _conversation(ChatBody(messages=messages), body, images)


def constraint(body: OllamaGenerationBody) -> ResponseConstraint | None:
    """Output constraint of `format`. Raises BadRequest."""
    spec = body.format
    if not isinstance(spec, str):
        if spec is None:
            return None
        return ResponseConstraint(spec, param="format")
    if spec not in ("", "json"):
        raise BadRequest(f'format is {spec!r}; it must be "json" or a JSON schema', "format")
    if spec:
        return ResponseConstraint({}, param="format")
    return None


def keep_alive_s(keep_alive: float | str) -> float:
    """Seconds of a `keep_alive`: a number, or `1h30m`; negative: for ever.

    Raises BadRequest.
    """
    if isinstance(keep_alive, str):
        sign = -1 if keep_alive.startswith("-") else 1
        text = keep_alive.removeprefix("-").removeprefix("+")
        parts = DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise BadRequest(
                f"keep_alive is {keep_alive!r}; it must be seconds, or such as 5m or 1h30m",
                "keep_alive",
            )
        keep_alive = sign * sum(float(number) * UNITS_S[unit] for number, unit in parts)
    if keep_alive < 0:
        return math.inf
    return keep_alive


def _conversation(chat: ChatBody, body: OllamaGenerationBody, images: ImageReader) -> Conversation:
    """Conversation whose last message of the assistant is continued."""
    conversation = openai_chat.conversation(chat, images)
    thinking, template = _effort(body.think)
    instruction = format_instruction(constraint(body))
    messages = conversation.messages
    is_open = messages[-1].role is Role.ASSISTANT and not messages[-1].tool_calls
    # An empty answer has nothing to continue.
    last = messages[-1:] if is_open and messages[-1].text else ()
    return structs.replace(
        conversation,
        messages=(*messages[: len(messages) - is_open], *instruction, *last),
        thinking=thinking,
        template=template,
        continue_final=bool(last),
    )


def _effort(think: bool | str | None) -> tuple[bool | None, dict[str, Any]]:
    """Thinking and template variables. Raises BadRequest for an unknown level."""
    if not isinstance(think, str):
        return think, {}
    if think not in LEVELS:
        raise BadRequest(
            f"think is {think!r}; it must be true, false, or one of {', '.join(LEVELS)}", "think"
        )
    return True, {"reasoning_effort": think}


def _messages(messages: Sequence[OllamaMessage], images: ImageReader) -> list[ChatMessageParam]:
    return [
        ChatMessageParam(
            role=message.role,
            content=_content(message.content, message.images, images),
            reasoning_content=message.thinking,
            tool_calls=message.tool_calls,
            tool_call_id=message.tool_call_id,
            name=message.tool_name,
        )
        for message in messages
    ]


def _content(
    content: AnyContent, image_data: Iterable[Any] | None, images: ImageReader
) -> AnyContent:
    """Content, or parts; a vision model reads images first."""
    parts: list[Any] = [{"type": "image", "data": data} for data in image_data or ()]
    if not parts:
        return content
    if not isinstance(content, list):
        content = [{"type": "text", "text": result_content(content) or ""}]
    if images.accepts_images:
        return [*parts, *content]
    return [*content, *parts]
