"""Output formats derived from chat templates, and the families that no template explains."""

from collections.abc import Iterable
from typing import Any

from mlxstack.core.conversation import Tool
from mlxstack.text.formats.description import (
    CallSyntax,
    DerivedFormat,
    FormatSource,
    ParsedMessage,
    ReasoningMarks,
)

__all__ = [
    "CallSyntax",
    "DerivedFormat",
    "FormatSource",
    "ParsedMessage",
    "ReasoningMarks",
    "derive_format",
    "read_answer",
]


def derive_format(tokenizer: Any) -> DerivedFormat:
    """The format of a model, from its mlx-lm TokenizerWrapper; cached by the template's digest."""
    return DerivedFormat()


def read_answer(
    output_format: DerivedFormat, raw: str, tools: Iterable[Tool], *, is_in_thinking: bool = False
) -> ParsedMessage:
    """The message that a raw answer means, special tokens spelled out."""
    return ParsedMessage(content=raw)
