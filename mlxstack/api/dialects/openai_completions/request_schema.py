"""Request body of legacy completions, read leniently."""

from mlxstack.api.dialects.openai_chat.request_schema import StreamOptions
from mlxstack.api.request_fields import Fields, Prompts


class CompletionBody(Fields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompts
    stream_options: StreamOptions | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
