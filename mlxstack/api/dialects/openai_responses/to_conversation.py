"""From a Responses body to the conversation that it means, and to how it is to be answered."""

from typing import Any

from mlxstack.api import common_fields
from mlxstack.api.dialects.openai_chat.message_content import read_system
from mlxstack.api.dialects.openai_chat.to_conversation import effort
from mlxstack.api.dialects.openai_responses.input_items import messages
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.api.json_instruction import asked_json
from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.service.generation_options import ToolChoiceMode
from mlxstack.text.grammar.response_format import ResponseConstraint

# What only a server that stores responses could do.
STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


def conversation(body: ResponsesBody, box: ToolNames) -> Conversation:
    """Raises BadRequest with the path of the field that cannot work."""
    for name in STATEFUL:
        if getattr(body, name):
            raise BadRequest(
                f"{name} is not supported: no responses are stored here; send the whole input", name
            )
    n_items = common_fields.n_parts([body.input])
    common_fields.bound(
        n_items, common_fields.MOST_MESSAGES + common_fields.MOST_CALLS, "input", "items"
    )
    common_fields.bound(len(body.tools or ()), common_fields.MOST_TOOLS, "tools", "tools")
    said = (*_instructions(body), *_input(body, box), *_format(body))
    if not said:
        raise BadRequest("input is empty; at least one message is needed", "input")
    wanted = (body.reasoning or {}).get("effort")
    thinking, template = effort(
        body.chat_template_kwargs, wanted if isinstance(wanted, str) else None
    )
    return Conversation(messages=said, tools=box.tools, thinking=thinking, template=template)


def tool_choice_mode(choice: str | dict[str, Any] | None) -> ToolChoiceMode:
    """Whether there must be a call. Raises BadRequest."""
    match choice:
        case None | "auto":
            return ToolChoiceMode.AUTO
        case "none":
            return ToolChoiceMode.NONE
        case "required" | {"type": "function" | "custom"}:
            return ToolChoiceMode.REQUIRED
        case {"type": "allowed_tools", "mode": str(mode)}:
            return tool_choice_mode(mode)
        case dict():
            return ToolChoiceMode.AUTO
    raise BadRequest(
        f"tool_choice is {choice!r}; known are none, auto, required, or a tool", "tool_choice"
    )


def forced_tool(choice: str | dict[str, Any] | None, box: ToolNames) -> str | None:
    """The one tool that must be called, by its name in the prompt."""
    match choice:
        case {"type": "function" | "custom", "name": str(name), **more}:
            namespace = more.get("namespace")
            return box.spoken(name, namespace if isinstance(namespace, str) else None)
    return None


def response_format(body: ResponsesBody) -> ResponseConstraint | None:
    """What the answer must look like."""
    match (body.text or {}).get("format"):
        case {"type": "json_schema" | "json_object", "schema": dict(schema)}:
            return ResponseConstraint(schema, param="text.format")
        case {"type": "json_schema" | "json_object"}:
            return ResponseConstraint(param="text.format")
    return None


def _instructions(body: ResponsesBody) -> tuple[Message, ...]:
    """As the first system message; given as items, they are read as such."""
    given = body.instructions
    if isinstance(given, list):
        return messages(given, ToolNames())
    return (Message(Role.SYSTEM, read_system(given, "instructions")),) if given else ()


def _input(body: ResponsesBody, box: ToolNames) -> tuple[Message, ...]:
    if isinstance(body.input, str):
        return (Message(Role.USER, body.input),)
    return messages(body.input, box)


def _format(body: ResponsesBody) -> tuple[Message, ...]:
    """A wish for JSON becomes a last instruction."""
    wanted = (body.text or {}).get("format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    match kind:
        case None | "text":
            return ()
        case "json_object" | "json_schema":
            assert isinstance(wanted, dict)
            schema = wanted.get("schema")
            return (asked_json(schema if isinstance(schema, dict) else None),)
    raise BadRequest(
        f"text.format.type is {kind!r}; known are text, json_object, json_schema",
        "text.format.type",
    )
