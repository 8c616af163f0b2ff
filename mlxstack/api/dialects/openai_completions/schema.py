"""Bodies of legacy completions; a request is read leniently."""

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.dialects.openai_chat.request_schema import ChunkedBody
from mlxstack.api.dialects.openai_chat.response_schema import FINGERPRINT
from mlxstack.api.prompts import Prompts
from mlxstack.api.request_fields import TopLogprobs
from mlxstack.api.response_fields import LegacyLogprobs, OpenAIUsage, Timings


class CompletionBody(ChunkedBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompts
    logprobs: TopLogprobs | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class CompletionChoice(Struct, frozen=True):
    """Completion of one prompt, or a part of it."""

    text: str
    index: int = 0
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(Struct, frozen=True):
    """Response, or one chunk of its stream."""

    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    system_fingerprint: str = FINGERPRINT
    object: str = "text_completion"
    usage: OpenAIUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
