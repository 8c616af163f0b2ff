"""Bodies of chats with items or fields of the Responses API."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from msgspec import field, structs

from mlxstack.api import request_fields
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam, Content, read_system
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_responses.request_schema import LOGPROBS, Item, ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import instruction_messages
from mlxstack.api.response_format import ResponseFormat
from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader


class AnyChatBody(ChatBody, kw_only=True):
    """Body of POST /v1/chat/completions, with `messages` or with `input`.

    `system` is that of Anthropic's API.
    """

    limits: ClassVar[tuple[str, ...]] = (*ChatBody.limits, "max_output_tokens")
    messages: list[ChatMessageParam] = field(default_factory=list)
    input: str | list[Item] | None = None
    instructions: str | list[Item] | None = None
    max_output_tokens: int | None = None
    text: Any = None
    system: Content = None


def responses_body(body: AnyChatBody, sent: dict[str, Any]) -> ResponsesBody:
    """Body of the Responses API, where `sent` has items.

    The fields that only chats have say the same there. Raises BadRequest.
    """
    request_fields.refuse(body, ("functions",), " beside items; send them as tools")
    fields = {**sent, "input": sent.get("messages") or body.input}
    if body.system and not body.instructions:
        fields["instructions"] = read_system(body.system, "system")
    if body.max_output_tokens is None:
        fields["max_output_tokens"] = body.max_completion_tokens
    if not isinstance(sent.get("reasoning"), dict):
        switch, template = to_conversation.thinking(body)
        if switch is not None:
            template["enable_thinking"] = switch
        fields |= {"reasoning": None, "chat_template_kwargs": template}
    if body.logprobs:
        fields["include"] = [*(sent.get("include") or ()), LOGPROBS]
    return request_fields.converted(fields, ResponsesBody, "")


@contextmanager
def named_as_sent(body: AnyChatBody) -> Iterator[None]:
    """Errors of items in `messages` name that field."""
    try:
        yield
    except BadRequest as error:
        if body.messages and error.param and error.param.startswith("input"):
            error.param = f"messages{error.param.removeprefix('input')}"
            if error.message.startswith("input"):
                error.message = f"messages{error.message.removeprefix('input')}"
        raise


def chat_body(body: AnyChatBody) -> AnyChatBody:
    """Body with `text.format` as its `response_format`. Raises BadRequest."""
    form = body.text.get("format") if isinstance(body.text, dict) else None
    if not form or body.response_format:
        return body
    chosen = request_fields.converted(form, ResponseFormat, "text.format")
    return structs.replace(body, response_format=chosen)


def conversation(body: AnyChatBody, images: ImageReader = TEXT_ONLY) -> Conversation:
    """Conversation of a body with messages, after its instructions."""
    parsed = to_conversation.conversation(body, images)
    before = instruction_messages(body.instructions)
    if body.system:
        before = (*before, Message(Role.SYSTEM, read_system(body.system, "system")))
    return structs.replace(parsed, messages=(*before, *parsed.messages))
