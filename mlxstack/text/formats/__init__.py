"""Output formats derived from chat templates, and the families that no template explains."""

from mlxstack.text.formats.derivation import derive_format
from mlxstack.text.formats.description import (
    CallSyntax,
    DerivedFormat,
    FormatSource,
    ParsedMessage,
    ReasoningMarks,
)
from mlxstack.text.formats.reading import read_answer

__all__ = [
    "CallSyntax",
    "DerivedFormat",
    "FormatSource",
    "ParsedMessage",
    "ReasoningMarks",
    "derive_format",
    "read_answer",
]
