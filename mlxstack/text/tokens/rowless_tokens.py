"""Tokens of a tokenizer without a row in the embedding.

Conversions add tokens and forget the weights. MLX checks no index, so such a token reads what lies
behind the array: no prompt may hold one.
"""

from collections.abc import Iterable
from typing import Any

from mlxstack.core.errors import BadRequest


def tokens_without_rows(tokenizer: Any, n_rows: int) -> dict[int, str]:
    """Texts of the tokens beyond the rows of the embedding."""
    texts = {token: text for text, token in tokenizer.get_vocab().items()}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts |= {token: entry.content for token, entry in added.items()}
    return {token: text for token, text in texts.items() if token >= n_rows}


class RowlessTokens:
    """Tokens of one model without a row."""

    def __init__(self, tokenizer: Any, n_rows: int) -> None:
        self._texts = tokens_without_rows(tokenizer, n_rows)

    def has_any(self, tokens: Iterable[int]) -> bool:
        """Whether one of these tokens has no row."""
        return not self._texts.keys().isdisjoint(tokens)

    def refuse(self, tokens: Iterable[int], param: str) -> None:
        """Raise BadRequest that names a token without a row."""
        if not self._texts:
            return
        token = next((token for token in tokens if token in self._texts), None)
        if token is not None:
            raise BadRequest(
                f"the token {self._texts[token]!r} ({token}) has no row in the weights of this "
                "model, so no prompt can hold it; leave its text out",
                param,
            )
