"""Request body of llama-server's completion, read leniently."""

from typing import ClassVar

from mlxstack.api.request_fields import Fields, Prompts


class LlamaCompletionBody(Fields, kw_only=True):
    """POST /completion. A limit of 0 computes the prompt and nothing else.

    A list with a token id is one prompt, any other list holds several.
    """

    least: ClassVar[int] = 0
    prompt: Prompts
    n_probs: int | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
