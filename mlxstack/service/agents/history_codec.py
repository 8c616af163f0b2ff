"""Messages as history.json holds them: OpenAI's shapes, readable without any model."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import Damaged
from mlxstack.service.response_parts import ContentPart, ReasoningPart, SpokenPart, ToolCallPart
from mlxstack.text.normalize_messages import plain_text


def written(message: Message) -> dict[str, Any]:
    """One message as an object; what it does not have is left out."""
    found: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_written_call(call) for call in message.tool_calls]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            found[key] = value
    return found


def read(found: Mapping[str, Any]) -> Message:
    """The opposite of `written`, and what people write: `content` may come in parts, or be none.

    Raises Damaged for what makes no sense, and Unsupported for parts that are not text.
    """
    try:
        role = Role(found["role"])
        return Message(
            role=role,
            # Joined as the doors do it: what is warmed shall be what is asked.
            text=plain_text(found.get("content"), "" if role is Role.SYSTEM else "\n"),
            reasoning=found.get("reasoning_content"),
            tool_calls=tuple(_read_call(call) for call in found.get("tool_calls") or ()),
            tool_call_id=found.get("tool_call_id"),
            name=found.get("name"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"a stored message makes no sense: {error!r}") from None


def answer(spoken: Iterable[SpokenPart]) -> Message:
    """What was said in reply, as the assistant's message."""
    parts = tuple(spoken)
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = (part for part in parts if isinstance(part, ToolCallPart))
    return Message(
        role=Role.ASSISTANT,
        text="".join(part.text for part in parts if isinstance(part, ContentPart)),
        reasoning=reasoning or None,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in calls),
    )


def _written_call(call: ToolCall) -> dict[str, Any]:
    given = call.arguments
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def _read_call(found: Mapping[str, Any]) -> ToolCall:
    function = found["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    kept = arguments if isinstance(arguments, dict) else function["arguments"]
    return ToolCall(str(found["id"]), str(function["name"]), kept)
