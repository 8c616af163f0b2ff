"""Tokens of a tokenizer without a row in the embedding.

Conversions add tokens and forget the weights. MLX checks no index, so such a token reads what lies
behind the array: no prompt may hold one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mlxstack.core.errors import BadRequest


def tokens_without_rows(tokenizer: Any, n_rows: int) -> dict[int, str]:
    """Texts of the tokens beyond the rows of the embedding."""
    texts = {token: text for text, token in tokenizer.get_vocab().items()}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts |= {token: entry.content for token, entry in added.items()}
    return {token: text for token, text in texts.items() if token >= n_rows}


def refuse_rowless(tokens: Iterable[int], rowless: Mapping[int, str], param: str) -> None:
    """Raise BadRequest that names a token without a row."""
    token = next((token for token in tokens if token in rowless), None)
    if token is not None:
        raise BadRequest(
            f"the token {rowless[token]!r} ({token}) has no row in the weights of this model, so "
            "no prompt can hold it; leave its text out",
            param,
        )
