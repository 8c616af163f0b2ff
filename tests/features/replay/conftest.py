"""Tokenizers of `tests/text`."""

from tests.text.conftest import chatml, harmony, mistral, plain, tagged, tokens_of

__all__ = ["chatml", "harmony", "mistral", "plain", "tagged", "tokens_of"]
