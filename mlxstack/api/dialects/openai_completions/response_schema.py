"""Response bodies of legacy completions."""

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.dialects.openai_chat.response_schema import FINGERPRINT
from mlxstack.api.response_fields import LegacyLogprobs, OpenAIUsage, Timings


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
