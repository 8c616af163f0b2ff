"""Converts a chat body to a conversation and generation options."""

from typing import Any
from uuid import uuid4

from msgspec import structs

from mlxstack.api import request_fields
from mlxstack.api.custom_tools import NO_CUSTOM_TOOLS, CustomTools, custom_tool
from mlxstack.api.dialects.openai_chat.messages import read_latest_user, read_messages
from mlxstack.api.dialects.openai_chat.request_schema import (
    ChatBody,
    ChatToolParam,
    FunctionSpec,
    ThinkingSwitch,
)
from mlxstack.api.guards import Connection
from mlxstack.api.request_fields import schema_of
from mlxstack.api.response_format import format_constraint, format_instruction
from mlxstack.api.tool_choice import allowed_tools, chosen_tool, require_offered, tool_choice_mode
from mlxstack.core.conversation import Conversation, Tool
from mlxstack.core.errors import BadRequest
from mlxstack.core.request import UNLIMITED
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader

Effort = tuple[bool | None, dict[str, Any]]
CUSTOM = "custom"
SWITCHED = {"enabled": True, "disabled": False}


def conversation(body: ChatBody, images: ImageReader = TEXT_ONLY) -> Conversation:
    """Conversation of a body. Raises BadRequest with the path of the field."""
    if not body.messages:
        raise BadRequest("messages is empty; at least one message is needed", "messages")
    _bound(body)
    switch, template = thinking(body)
    messages = read_messages(body.messages, images, custom_tools(body).names)
    n_calls = sum(len(turn.tool_calls) for turn in messages)
    request_fields.bound(n_calls, request_fields.MAX_CALLS, "messages", "tool calls")
    last = body.messages[-1]
    return Conversation(
        messages=(*messages, *format_instruction(response_format(body))),
        tools=_tools(body),
        thinking=switch,
        template=template,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message or last.prefix or last.partial),
    )


def _bound(body: ChatBody) -> None:
    """Raises BadRequest for too many items, or two ends of the prompt."""
    if body.add_generation_prompt and body.continue_final_message:
        raise BadRequest(
            "add_generation_prompt and continue_final_message cannot both be true",
            "continue_final_message",
        )
    request_fields.bound(len(body.messages), request_fields.MAX_MESSAGES, "messages", "messages")
    n_parts = request_fields.n_parts(turn.content for turn in body.messages)
    request_fields.bound(n_parts, request_fields.MAX_PARTS, "messages", "parts of contents")
    for name in ("tools", "functions"):
        n_tools = len(getattr(body, name) or ())
        request_fields.bound(n_tools, request_fields.MAX_TOOLS, name, "tools")


def new_id() -> str:
    """Id of a chat completion."""
    return f"chatcmpl-{uuid4().hex}"


def options(body: ChatBody, connection: Connection, service: Service) -> GenerationOptions:
    """Generation options of a chat body. Raises BadRequest."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    choice = tool_choice(body)
    # mlx_lm.server has the number in `logprobs`.
    n_sent = None if isinstance(body.logprobs, bool) else body.logprobs
    n_top = body.top_logprobs or n_sent
    common = request_fields.options(
        body, new_id(), request_fields.n_logprobs(bool(body.logprobs), n_top), connection, service
    )
    return structs.replace(
        common,
        tool_choice=tool_choice_mode(choice),
        forced_tool=chosen_tool(choice),
        allowed_tools=allowed_tools(choice, chosen_tool),
        is_one_call=body.parallel_tool_calls is False or is_legacy(body),
        has_progress=bool(body.return_progress),
        predicted_text=predicted_text(body),
        thinking_budget=thinking_budget(body),
        omitted_tools=omitted_tools(body),
        response_format=response_format(body) or common.response_format,
    )


def tool_choice(body: ChatBody) -> str | dict[str, Any] | None:
    """Tool choice of a body, in the older form `function_call` too."""
    if body.tool_choice is None:
        return body.function_call
    return body.tool_choice


def response_format(body: ChatBody) -> ResponseConstraint | None:
    """Output constraint of a body. Raises BadRequest."""
    return format_constraint(body.response_format, "response_format")


def predicted_text(body: ChatBody) -> str:
    """The text that the client expects as the answer. Raises BadRequest."""
    predicted = body.prediction
    if predicted is None:
        return ""
    if predicted.type != "content":
        raise BadRequest(
            f"prediction.type is {predicted.type!r}; known is content", "prediction.type"
        )
    return read_latest_user(predicted.content, "prediction.content", joint="")


def custom_tools(body: ChatBody) -> CustomTools:
    """Custom tools of a body. Raises BadRequest."""
    specs = [(i, spec) for i, spec in enumerate(body.tools or ()) if _is_custom(spec)]
    names = frozenset(_tool(spec, f"tools[{i}]").name for i, spec in specs)
    return CustomTools(names) if names else NO_CUSTOM_TOOLS


def is_legacy(body: ChatBody) -> bool:
    """True for a body with `functions`, whose answer has one `function_call`."""
    return bool(body.functions) and not body.tools


def omitted_tools(body: ChatBody) -> tuple[str, ...]:
    """Types of the tools that are not offered to the model."""
    return tuple(spec.type or "" for spec in body.tools or () if not _is_offered(spec))


def _tools(body: ChatBody) -> tuple[Tool, ...]:
    """Functions and custom tools of a body. Raises BadRequest."""
    specs = body.tools or ()
    offered = [_tool(spec, f"tools[{i}]") for i, spec in enumerate(specs) if _is_offered(spec)]
    require_offered([spec.type or "" for spec in specs], len(offered))
    return (*offered, *(_function(spec) for spec in body.functions or ()))


def _is_custom(spec: ChatToolParam) -> bool:
    """Whether a tool takes text; Anthropic's of this type has a schema."""
    return spec.type == CUSTOM and spec.input_schema is None


def _is_offered(spec: ChatToolParam) -> bool:
    return spec.type in ("function", CUSTOM) or spec.function is not None


def _tool(spec: ChatToolParam, path: str) -> Tool:
    if spec.function is not None:
        return _function(spec.function)
    if _is_custom(spec):
        own = spec.custom or spec
        if not own.name:
            raise BadRequest(f"{path}.custom.name: Field required", f"{path}.custom.name")
        return custom_tool(own.name, own.description, own.format)
    if not spec.name:
        path = f"{path}.function"
        raise BadRequest(f"{path}: Field required, with the name and the parameters", path)
    return Tool(spec.name, spec.description or "", schema_of(spec))


def _function(spec: FunctionSpec) -> Tool:
    return Tool(spec.name, spec.description or "", schema_of(spec))


def thinking(body: ChatBody) -> Effort:
    """Thinking by the first field that switches it."""
    switches = (body.thinking, body.reasoning, body.enable_thinking, body.think)
    states, levels = zip(*map(_switch, (body.reasoning_effort, *switches)), strict=True)
    switch = next((state for state in states if state is not None), None)
    return effort(body.chat_template_kwargs, next(filter(None, levels), None), switch)


def thinking_budget(body: ChatBody) -> int | None:
    """Most tokens of reasoning, by any of the fields for it."""
    switches = [
        switch for switch in (body.thinking, body.reasoning) if isinstance(switch, ThinkingSwitch)
    ]
    switch_budgets = [
        budget for switch in switches for budget in (switch.budget_tokens, switch.max_tokens)
    ]
    budgets = (request_fields.thinking_budget(body), *switch_budgets)
    chosen = [budget for budget in budgets if budget is not None]
    unlimited = UNLIMITED if chosen else None
    return next((budget for budget in chosen if budget >= 0), unlimited)


def _switch(switch: bool | str | ThinkingSwitch | None) -> tuple[bool | None, str | None]:
    """State and level of a switch; a word is a level."""
    if isinstance(switch, ThinkingSwitch):
        return SWITCHED.get(switch.type or "", switch.enabled), switch.effort
    if isinstance(switch, str):
        return None, switch
    return switch, None


def effort(kwargs: dict[str, Any] | None, level: str | None, switch: bool | None = None) -> Effort:
    """Thinking and template variables; `kwargs` win over `switch`."""
    template = dict(kwargs or {})
    thinking = template.pop("enable_thinking", switch)
    if thinking is not None and not isinstance(thinking, bool):
        raise BadRequest("enable_thinking must be true or false", "chat_template_kwargs")
    if level == "none":
        if thinking is None:
            thinking = False
    elif level is not None:
        template.setdefault("reasoning_effort", level)
    return thinking, template
