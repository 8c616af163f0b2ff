"""Request body of legacy completions, read leniently."""

from mlxstack.api.dialects.openai_chat.request_schema import ChunkedBody
from mlxstack.api.prompts import Prompts
from mlxstack.api.request_fields import TopLogprobs


class CompletionBody(ChunkedBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompts
    logprobs: TopLogprobs | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
