"""Response bodies of Ollama's API. Durations are nanoseconds, times are RFC 3339."""

from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.response_fields import Loops, SampledLogprob

OLLAMA_VERSION = "0.13.4"
"""Ollama release of this API, the first with Responses; clients refuse an older server."""

NS = 1_000_000_000


class OllamaFunction(Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(Struct, frozen=True):
    id: str
    function: OllamaFunction


class OllamaReply(Struct, frozen=True):
    """Message of the model, or a part of it."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: tuple[OllamaToolCall, ...] | UnsetType = UNSET


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """Answer, or one line of its stream; the last has costs."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: tuple[SampledLogprob, ...] | UnsetType = UNSET
    loops: Loops = UNSET


class OllamaChat(OllamaAnswer, frozen=True, kw_only=True):
    """Answer of /api/chat."""

    message: OllamaReply


class OllamaGeneration(OllamaAnswer, frozen=True, kw_only=True):
    """Answer of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(Struct, frozen=True):
    """Answer of /api/embed."""

    model: str
    embeddings: tuple[list[float], ...]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct, frozen=True):
    """Answer of /api/embeddings."""

    embedding: list[float]


class OllamaDetails(Struct, frozen=True):
    """Kind and size of a model."""

    parent_model: str
    format: str
    family: str
    families: tuple[str, ...]
    parameter_size: str
    quantization_level: str


class OllamaEntry(Struct, frozen=True):
    """Entry of a list of models."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(OllamaEntry, frozen=True):
    """Entry of /api/tags."""

    modified_at: str


class OllamaLoadedModel(OllamaEntry, frozen=True):
    """Entry of /api/ps."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaTags(Struct, frozen=True):
    models: tuple[OllamaModel, ...]


class OllamaProcesses(Struct, frozen=True):
    models: tuple[OllamaLoadedModel, ...]


class OllamaModelInfo(Struct, frozen=True):
    """Answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: tuple[str, ...]
    modified_at: str


class OllamaStatus(Struct, frozen=True):
    """Answer of /api/pull, or one line of its stream."""

    status: str


def nanoseconds(seconds: float) -> int:
    """Seconds as Ollama's unit."""
    return round(seconds * NS)


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
