"""Request bodies of chat completions, read leniently."""

from typing import Any, ClassVar

from msgspec import Struct

from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam, Content
from mlxstack.api.request_fields import Fields, SchemaFields, TopLogprobs
from mlxstack.api.response_format import ResponseFormat


class FunctionSpec(SchemaFields):
    name: str
    description: str | None = None


class CustomSpec(Struct):
    """Custom tool, which takes free text."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatToolParam(SchemaFields):
    """A tool; those of other types than `function` and `custom` are left out.

    Some clients write the fields of the inner object beside `type`.
    """

    type: str | None = "function"
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None
    name: str | None = None
    description: str | None = None
    format: dict[str, Any] | None = None


class StreamOptions(Struct):
    """Usage in the last chunk of a stream, or in all."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChunkedBody(Fields, kw_only=True):
    """Body whose answer is a stream of chunks on request."""

    stream_options: StreamOptions | None = None


class Prediction(Struct):
    """Predicted answer of the client, whole or in parts."""

    type: str = "content"
    content: Content = None


class ThinkingSwitch(Struct):
    """Thinking as others switch it.

    z.ai, DeepSeek and Moonshot have a `type` (enabled or disabled), Anthropic `budget_tokens`
    beside it, OpenRouter the rest.
    """

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    max_tokens: int | None = None


class ChatBody(ChunkedBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    limits: ClassVar[tuple[str, ...]] = ("n_predict", "max_completion_tokens", "max_tokens")
    messages: list[ChatMessageParam]
    max_completion_tokens: int | None = None
    tools: list[ChatToolParam] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[FunctionSpec] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | TopLogprobs | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: str | ThinkingSwitch | None = None
    thinking: bool | ThinkingSwitch | None = None
    reasoning: bool | str | ThinkingSwitch | None = None
    think: bool | str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_progress: bool | None = None
    verbose: bool | None = None
    prediction: Prediction | None = None
