"""Gemma's values without marks: scalars, and text without quotes."""

import re
from typing import Any

from mlxstack.text.formats.argument_values import BOOLEANS, NULLS, CalledArguments, decoded

SCALAR = re.compile(r"(?s)([\"'])(?:(?!\1)[^\\]|\\.)*(?:\1|\\?\Z)|[^,:{}\[\]]*")
"""A value without marks; quotes of other notations stand around some."""


class GemmaArguments(CalledArguments):
    """The arguments of a call of Gemma."""

    def is_copied(self, key: str, sign: str) -> bool:
        """Whether a value that begins so means what it says."""
        is_text = self.declares(key) and bool(self.types_of(key).texts)
        return sign in "<{[\"'" or not is_text


def parse_scalar(text: str) -> Any:
    """Null, a boolean, a number, else text. Raises ValueError for none."""
    if not text:
        raise ValueError("a value is missing")
    if text in NULLS:
        return None
    if text.casefold() in ("true", "false"):
        return BOOLEANS[text.casefold()]
    if text[:1] == "'" == text[-1:]:
        return text[1:-1]
    if text[:1] in '"+-0123456789':
        return decoded(text, text.removeprefix('"'))
    return text
