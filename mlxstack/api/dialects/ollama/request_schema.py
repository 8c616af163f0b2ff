"""Request bodies of Ollama's API, read leniently."""

from typing import Any, ClassVar

from msgspec import Struct

from mlxstack.api.dialects.openai_chat.messages import AnyContent, ToolCallParam
from mlxstack.api.dialects.openai_chat.request_schema import ChatToolParam
from mlxstack.api.request_fields import Fields, TopLogprobs


class OllamaOptions(Fields, kw_only=True):
    """Sampling options; those of the model's runtime, such as `num_ctx`, are ignored."""

    limits: ClassVar[tuple[str, ...]] = ()
    num_predict: int | None = None


class OllamaMessage(Struct):
    """One message; its calls and results may lack ids."""

    role: str
    content: AnyContent = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaModelBody(Struct, kw_only=True):
    """Body of routes about a model; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaWorkBody(Struct, kw_only=True):
    """Body that loads the model, and says for how long."""

    model: str | None = None
    keep_alive: float | str | None = None


class OllamaGenerationBody(OllamaWorkBody, kw_only=True):
    """Common fields of chat and generate; `stream` defaults to true."""

    stream: bool | None = None
    think: bool | str | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    cache: str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaChatBody(OllamaGenerationBody, kw_only=True):
    """Body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[ChatToolParam] | None = None


class OllamaGenerateBody(OllamaGenerationBody, kw_only=True):
    """Body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class OllamaEmbedBody(OllamaWorkBody, kw_only=True):
    """Body of POST /api/embed."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsBody(OllamaWorkBody, kw_only=True):
    """Body of POST /api/embeddings, the older form for one text."""

    prompt: str
