"""Output formats, derived from chat templates or listed by family."""

from mlxstack.text.formats.answer_reader import read_answer
from mlxstack.text.formats.derivation import derive_format
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
