"""Converts a chat body to a conversation."""

from typing import Any

from mlxstack.api import request_fields
from mlxstack.api.dialects.openai_chat.request_schema import (
    ChatBody,
    ChatToolParam,
    ResponseFormat,
)
from mlxstack.api.request_fields import chosen_tool, json_instruction
from mlxstack.core.conversation import Conversation, Message, Tool
from mlxstack.core.errors import BadRequest
from mlxstack.service.generation_options import ToolChoiceMode
from mlxstack.service.openai_messages import read_messages, read_prediction
from mlxstack.text.grammar.response_format import ResponseConstraint


def conversation(body: ChatBody) -> Conversation:
    """Conversation of a body. Raises BadRequest with the path of the field."""
    if not body.messages:
        raise BadRequest("messages is empty; at least one message is needed", "messages")
    _bound(body)
    thinking, template = effort(body.chat_template_kwargs, body.reasoning_effort)
    return Conversation(
        messages=(*read_messages(body.messages), *_format(body)),
        tools=_tools(body.tools),
        thinking=thinking,
        template=template,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
    )


def _bound(body: ChatBody) -> None:
    """Raises BadRequest for more than any context holds."""
    request_fields.bound(len(body.messages), request_fields.MOST_MESSAGES, "messages", "messages")
    n_parts = request_fields.n_parts(turn.content for turn in body.messages)
    request_fields.bound(n_parts, request_fields.MOST_PARTS, "messages", "parts of contents")
    n_calls = sum(len(turn.tool_calls or ()) for turn in body.messages)
    request_fields.bound(n_calls, request_fields.MOST_CALLS, "messages", "tool calls")
    request_fields.bound(len(body.tools or ()), request_fields.MOST_TOOLS, "tools", "tools")


def tool_choice_mode(choice: str | dict[str, Any] | None) -> ToolChoiceMode:
    """Tool choice of a request. Raises BadRequest."""
    match choice:
        case None | "auto":
            return ToolChoiceMode.AUTO
        case "none":
            return ToolChoiceMode.NONE
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode)}}:
            return tool_choice_mode(mode)
        case "required":
            return ToolChoiceMode.REQUIRED
        case dict() if chosen_tool(choice) is not None:
            return ToolChoiceMode.REQUIRED
    raise BadRequest(
        f"tool_choice is {choice!r}; known are none, auto, required, or a function",
        "tool_choice",
    )


def forced_tool(body: ChatBody) -> str | None:
    """Name of the function that must be called."""
    return chosen_tool(body.tool_choice)


def allowed_tools(body: ChatBody) -> tuple[str, ...]:
    """Names of the functions allowed; none if all are."""
    match body.tool_choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(tools)}}:
            return tuple(name for tool in tools if (name := chosen_tool(tool)) is not None)
    return ()


def response_format(body: ChatBody) -> ResponseConstraint | None:
    """Output constraint of a body."""
    spec = body.response_format
    if spec is None or spec.type == "text":
        return None
    return ResponseConstraint(_schema(spec) or {}, param="response_format")


def predicted_text(body: ChatBody) -> str:
    """The text that the client expects as the answer. Raises BadRequest."""
    predicted = body.prediction
    if predicted is None:
        return ""
    if predicted.type != "content":
        raise BadRequest(
            f"prediction.type is {predicted.type!r}; known is content", "prediction.type"
        )
    return read_prediction(predicted.content, "prediction.content")


def _schema(spec: ResponseFormat) -> dict[str, Any] | None:
    return spec.json_schema.schema if spec.json_schema else spec.schema


def _tools(specs: list[ChatToolParam] | None) -> tuple[Tool, ...]:
    """Functions of a body. Raises BadRequest."""
    for i, spec in enumerate(specs or ()):
        if spec.type == "function" and spec.function is None:
            at = f"tools[{i}].function"
            raise BadRequest(f"{at}: Field required, with the name and the parameters", at)
    functions = [spec.function for spec in specs or () if spec.function is not None]
    return tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in functions)


def effort(kwargs: dict[str, Any] | None, level: str | None) -> tuple[bool | None, dict[str, Any]]:
    """Thinking and template variables; `kwargs` win over the `wanted` effort."""
    template = dict(kwargs or {})
    thinking = template.pop("enable_thinking", None)
    if thinking is not None and not isinstance(thinking, bool):
        raise BadRequest("enable_thinking must be true or false", "chat_template_kwargs")
    if level == "none":
        thinking = False if thinking is None else thinking
    elif level is not None:
        template.setdefault("reasoning_effort", level)
    return thinking, template


def _format(body: ChatBody) -> tuple[Message, ...]:
    """A JSON format adds a last instruction."""
    spec = body.response_format
    if spec is None or spec.type == "text":
        return ()
    if spec.type not in ("json_object", "json_schema"):
        raise BadRequest(
            f"response_format.type is {spec.type!r}; known are text, json_object, json_schema",
            "response_format.type",
        )
    return (json_instruction(_schema(spec)),)
