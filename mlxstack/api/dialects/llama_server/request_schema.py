"""Request body of llama-server's completion, read leniently."""

from typing import ClassVar

from mlxstack.api.prompts import Prompts
from mlxstack.api.request_fields import Fields, TopLogprobs


class LlamaCompletionBody(Fields, kw_only=True):
    """POST /completion. A limit of 0 computes the prompt and nothing else.

    A list with a token id is one prompt, any other list holds several.
    `response_fields` are the only fields of the answer, each by its path, as `timings/prompt_n`.
    """

    least: ClassVar[int] = 0
    prompt: Prompts
    n_probs: TopLogprobs | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = None
