"""Structured output: grammar of a `response_format`.

White space between the parts of a JSON text is at most one space, so that no model can fill its
answer with it.
"""

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec import Struct

from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.enforced_schema import circular_reference, enforced
from mlxstack.text.grammar.grammar_check import check_multiples

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    # Keywords that llguidance knows and cannot enforce are left out.
    "lenient": True,
}
MAX_CHARS = 1_000_000
LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
"""First line of a grammar in Lark's notation, or its rule `start`."""


class ResponseConstraint(Struct, frozen=True):
    """JSON schema, grammar in llama.cpp's or Lark's notation, or regular expression.

    `param` is the field it came in, for errors.
    """

    schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    param: str = "response_format"


def grammar_of(shape: ResponseConstraint) -> str:
    """Grammar of a response format.

    Raises BadRequest for no grammar, and for one too large.
    """
    if shape.grammar is not None:
        bound(shape.grammar, shape.param)
        try:
            return LLMatcher.grammar_from_lark(_in_lark(shape.grammar))
        except Exception as error:
            raise BadRequest(f"{shape.param}: {error}", shape.param) from None
    if shape.regex is not None:
        bound(shape.regex, shape.param)
        return LLMatcher.grammar_from_regex(shape.regex)
    return schema_grammar(shape.schema or {"type": "object"}, shape.param)


def _in_lark(grammar: str) -> str:
    """A grammar in Lark's notation, which may be in llama.cpp's."""
    if LARK.search(grammar):
        return grammar
    return gbnf_to_lark(grammar)


def schema_grammar(schema: dict[str, Any], param: str) -> str:
    """Grammar of a JSON schema. Raises BadRequest as `grammar_of` does."""
    bound(json_of(schema, param), param)
    check_multiples(schema, param)
    return LLMatcher.grammar_from_json_schema(enforced_json(schema, param))


def enforced_json(schema: dict[str, Any], param: str) -> str:
    """Schema for llguidance.

    Raises BadRequest as `json_of` does, and for a circular reference.
    """
    try:
        whole = enforced(schema)
    except RecursionError as error:
        raise BadRequest(f"{param} is not a valid JSON schema: {error}", param) from None
    if (reference := circular_reference(whole)) is not None:
        raise BadRequest(f"{param}: {reference} refers to nothing but itself", param)
    return json_of({**whole, "x-guidance": JSON_OPTIONS}, param)


def json_of(schema: dict[str, Any], param: str) -> str:
    """Schema as text. Raises BadRequest for absurd numbers and depths."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{param} is not a valid JSON schema: {error}", param) from None


def bound(text: str, param: str) -> None:
    """Raises BadRequest for a grammar that is too large."""
    if len(text) > MAX_CHARS:
        raise BadRequest(
            f"{param} has {len(text)} characters; a grammar may have {MAX_CHARS}", param
        )
