"""Gemma's call arguments: JSON with bare keys and string marks."""

import re
from typing import Any

from mlxstack.text.formats.argument_values import BOOLEANS, NULLS, decoded

SCALAR = re.compile(r"(?s)([\"'])(?:(?!\1)[^\\]|\\.)*(?:\1|\\?\Z)|[^,:{}\[\]]*")
"""A value without marks; quotes of other notations stand around some."""

_SKIPPED = re.compile(r"[, \n\t]*")


def parse_gemma_call(text: str, quote: str) -> dict[str, Any]:
    """An object in braces. Raises ValueError."""
    value, end = _value(text, 0, quote)
    if end != len(text) or not isinstance(value, dict):
        raise ValueError(f"no object: {text!r}")
    return value


def _value(text: str, at: int, quote: str) -> tuple[Any, int]:
    at = _skip(text, at)
    if text.startswith(quote, at):
        return _text(text, at, quote)
    if text.startswith("{", at):
        return _object(text, at + 1, quote)
    if text.startswith("[", at):
        return _list(text, at + 1, quote)
    end = SCALAR.match(text, at).end()  # type: ignore[union-attr]
    return parse_scalar(text[at:end].strip()), end


def _object(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while not text.startswith("}", at := _skip(text, at)):
        if text.startswith(quote, at):
            key, at = _text(text, at, quote)
        else:
            end = text.index(":", at)
            key, at = text[at:end].strip().strip('"'), end
        members[key], at = _value(text, text.index(":", at) + 1, quote)
    return members, at + 1


def _list(text: str, at: int, quote: str) -> tuple[list[Any], int]:
    items = []
    while not text.startswith("]", at := _skip(text, at)):
        value, at = _value(text, at, quote)
        items.append(value)
    return items, at + 1


def _text(text: str, at: int, quote: str) -> tuple[str, int]:
    end = text.index(quote, at + len(quote))
    return text[at + len(quote) : end], end + len(quote)


def _skip(text: str, at: int) -> int:
    return _SKIPPED.match(text, at).end()  # type: ignore[union-attr]


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
    return decoded(text, text.removeprefix('"')) if text[:1] in '"+-0123456789' else text
