"""Request body and input items of the Responses API, read leniently."""

from typing import Any, ClassVar

from msgspec import Struct, structs

from mlxstack.api.dialects.openai_chat.messages import AnyContent, Content, ToolCallParam
from mlxstack.api.dialects.openai_chat.request_schema import CustomSpec, FunctionSpec
from mlxstack.api.request_fields import Fields, SchemaFields, TopLogprobs, schema_of
from mlxstack.api.response_format import ResponseFormat

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
"""Entry of `include` that asks for log probabilities."""


class ResponsesBody(Fields, kw_only=True):
    """POST /v1/responses. Tools of unknown types are skipped."""

    limits: ClassVar[tuple[str, ...]] = ("max_output_tokens", "max_tokens")
    input: str | list[Item]
    instructions: str | list[Item] | None = None
    tools: list[Item] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Any = None
    safety_identifier: Any = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def items_of(body: ResponsesBody) -> list[Item]:
    """Items of the input; none of a text."""
    if isinstance(body.input, list):
        return body.input
    return []


class InputItem(Struct):
    """Input item of any type that is read.

    Each type has some of these fields. `input` is that of a custom tool; calls of tools that the
    API defines have an action, several, an operation or arguments, and those that OpenAI's servers
    ran also the result. The summary of reasoning counts where no other text is readable. `author`
    is another agent; `approve` answers whether a call may run. `tools` join the conversation. The
    same name has values of other types in items of other types.
    """

    type: str = "message"
    role: str | None = None
    content: Content = None
    summary: Content = None
    encrypted_content: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: str | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    action: Any = None
    actions: Any = None
    operation: Any = None
    queries: Any = None
    code: Any = None
    output: AnyContent = None
    outputs: Any = None
    results: Any = None
    error: Any = None
    status: str | None = None
    tools: list[Any] | None = None
    author: str | None = None
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None


class ResponsesToolParam(SchemaFields):
    """Tool of any type; `tools` are those of a namespace.

    A tool of the chat API has its fields in `function` or `custom`.
    """

    type: str | None = None
    name: str = ""
    description: str | None = None
    function: FunctionSpec | None = None
    parameters: Any = None
    format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    execution: str | None = None
    custom: CustomSpec | None = None


def flat_tool(tool: ResponsesToolParam) -> ResponsesToolParam:
    """Tool with its inner fields beside the type."""
    if tool.name:
        return tool
    if (text_tool := tool.custom) is not None:
        return structs.replace(
            tool, name=text_tool.name, description=text_tool.description, format=text_tool.format
        )
    if (own := tool.function) is None:
        return tool
    schema = schema_of(own)
    return structs.replace(tool, name=own.name, description=own.description, parameters=schema)
