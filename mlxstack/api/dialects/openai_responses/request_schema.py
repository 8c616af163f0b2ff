"""Request body and input items of the Responses API, read leniently."""

from typing import Any, ClassVar

from msgspec import Struct

from mlxstack.api.request_fields import Fields
from mlxstack.service.parts.openai_messages import AnyContent, Content, ToolCallParam

Item = dict[str, Any]


class ResponsesBody(Fields, kw_only=True):
    """POST /v1/responses. Items and tools of unknown types are skipped."""

    limits: ClassVar[tuple[str, ...]] = ("max_output_tokens", "max_tokens")
    input: str | list[Item]
    instructions: str | list[Item] | None = None
    tools: list[Item] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageInput(Struct):
    role: str
    content: Content = None
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: str | None = None


class CallInput(Struct):
    """Earlier call of a function, or of a custom tool (`input`)."""

    name: str
    call_id: str | None = None
    id: str | None = None
    arguments: Any = None
    input: str = ""
    namespace: str | None = None


class BuiltInCallItem(Struct):
    """Earlier call of a tool that the API defines: shell commands, a patch, a search.

    A computer has one action or several.
    """

    type: str
    action: dict[str, Any] | None = None
    actions: list[dict[str, Any]] | None = None
    operation: dict[str, Any] | None = None
    arguments: str | dict[str, Any] | None = None
    call_id: str | None = None
    id: str | None = None


class HostedCallItem(Struct):
    """Earlier call that OpenAI's servers ran, with its result."""

    type: str
    id: str = ""
    status: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    action: dict[str, Any] | None = None
    queries: list[str] | None = None
    code: str | None = None
    output: Any = None
    outputs: Any = None
    results: Any = None
    error: Any = None


class OutputItem(Struct):
    """Result of a call; tools that join the conversation in `tools`."""

    tools: list[Any] | None = None
    output: AnyContent = None
    call_id: str | None = None
    id: str | None = None
    status: str | None = None


class AgentMessageItem(Struct):
    """Message from one agent to another; its parts are text or encrypted."""

    content: Content = None
    author: str | None = None


class ApprovalInput(Struct):
    """Answer of the user to a call that waits for approval."""

    approval_request_id: str
    approve: bool
    reason: str | None = None


class ReasoningInput(Struct):
    """Reasoning of the assistant; its summary counts where no other text is readable."""

    content: Content = None
    summary: Content = None
    encrypted_content: str | None = None


class ResponsesToolParam(Struct):
    """Tool of any type; `tools` are those of a namespace."""

    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: Any = None
    format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    execution: str | None = None
