"""Parsers of tool calls that keep every text exactly, where those of mlx-lm change it.

An own parser reads a call only if all of it has the published form; mlx-lm's, which forgives more,
reads the rest.
"""

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlxstack.text.tool_call_parser import Parser, ToolSchemas

TEXT_TYPES = frozenset({"string", "str", "text", "varchar", "char", "enum"})
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
NULLS = ("null", "None")
UNDECODABLE = (ValueError, SyntaxError, TypeError)
NAME = r"[^\s<>{}\[\]()=\"']+"


class TagSyntax(Struct, frozen=True):
    """Regular expressions of a call whose arguments stand between tags.

    `head` holds the group `name`, `argument` the groups `key` and `value`; `tail` ends a call.
    An argument ends only where another one or the tail follows, so that its text may hold its
    own closing tag. `guesses`: an argument that the tool does not have may be JSON.
    """

    head: re.Pattern[str]
    argument: re.Pattern[str]
    tail: re.Pattern[str]
    guesses: bool = False


def _format(head: str, argument: str, tail: str, *, guesses: bool = False) -> TagSyntax:
    opens = argument.partition("(?P<key>")[0]
    return TagSyntax(
        re.compile(rf"\s*{head}\s*"),
        re.compile(rf"{argument}(?=\s*(?:{opens}|{tail}))\s*", re.DOTALL),
        re.compile(rf"{tail}\s*"),
        guesses,
    )


GLM = _format(
    rf"(?P<name>{NAME})",
    r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>(?:\\n|\s)*<arg_value>(?P<value>.*?)</arg_value>",
    r"\Z",
    guesses=True,
)
QWEN_CODER = _format(
    rf"<function=(?P<name>{NAME})>",
    r"<parameter=(?P<key>[^\s<>]+)>\n?(?P<value>.*?)\n?</parameter>",
    r"</function>",
)
MINIMAX = _format(
    r"<invoke name=\"(?P<name>[^\"<>]+)\">",
    r"<parameter name=\"(?P<key>[^\"<>]+)\">(?P<value>.*?)</parameter>",
    r"</invoke>",
)
MISTRAL_HEADER = re.compile(r"([\w-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?\[ARGS\]\s*")


def parser_of(tokenizer: Any) -> Parser | None:
    """The parser for the calls of a model, from its mlx-lm TokenizerWrapper; None without any."""
    published = tokenizer.tool_parser
    return None if published is None else parser_for(format_name(published), published)


def format_name(parser: Any) -> str:
    """The name of the call format that a parser reads: that of its module."""
    return str(getattr(parser, "__module__", "")).rpartition(".")[2]


def parser_for(name: str, published: Parser) -> Parser:
    """The own parser of a format, in front of the published one; the latter if there is none."""
    own = PARSERS.get(name)
    if own is None:
        return published

    def parse(text: str, shapes: ToolSchemas) -> Any:
        found = own(text, shapes)
        return published(text, shapes) if found is None else found

    return parse


def is_inside_argument(name: str, text: str) -> bool:
    """Whether a call of this format, so far `text`, is in the middle of an argument."""
    if name == "json_tools":
        return len(re.findall(r'(?<!\\)(?:\\\\)*"', text)) % 2 == 1
    opens, closes = ARGUMENT_TAGS.get(name, ("", ""))
    return bool(opens) and text.rfind(opens) > text.rfind(closes)


def _tagged(form: TagSyntax) -> Callable[[str, ToolSchemas], list[dict[str, Any]] | None]:
    def parse(text: str, shapes: ToolSchemas) -> list[dict[str, Any]] | None:
        """The calls in a text that holds nothing else, else None."""
        calls: list[dict[str, Any]] = []
        at = 0
        while at < len(text) or not calls:
            head = form.head.match(text, at)
            if head is None:
                return None
            name, at = head["name"], head.end()
            schemas = _properties(name, shapes)
            arguments: dict[str, Any] = {}
            while argument := form.argument.match(text, at):
                key, at = argument["key"], argument.end()
                unknown = {} if form.guesses else {"type": "string"}
                arguments[key] = _value(argument["value"], schemas.get(key, unknown))
            tail = form.tail.match(text, at)
            if tail is None:
                return None
            at = tail.end()
            calls.append({"name": name, "arguments": arguments})
        return calls

    return parse


def _mistral(text: str, _: ToolSchemas) -> list[dict[str, Any]] | None:
    """Calls `name[CALL_ID]id[ARGS]{...}`; None if the text has no call id."""
    if "[CALL_ID]" not in text:
        return None
    decoder = json.JSONDecoder()
    calls: list[dict[str, Any]] = []
    at = 0
    while (head := MISTRAL_HEADER.search(text, at)) is not None:
        arguments, at = decoder.raw_decode(text, head.end())
        calls.append({"name": head[1], "id": head[2], "arguments": arguments})
    return calls


def _properties(name: str, shapes: ToolSchemas) -> dict[str, Any]:
    for shape in shapes:
        if shape["function"]["name"] == name:
            found = shape["function"]["parameters"].get("properties")
            return found if isinstance(found, dict) else {}
    return {}


def _value(text: str, schema: Any) -> Any:
    """An argument by its schema; text stays as it is, white space included."""
    known = schema if isinstance(schema, dict) else {}
    kind = str(known.get("type", "")).strip().lower()
    if kind in TEXT_TYPES:
        return None if known.get("nullable") is True and text in NULLS else text
    bare = text.strip()
    if kind == "boolean" and bare.lower() in BOOLEANS:
        return BOOLEANS[bare.lower()]
    value = _decoded(bare, text)
    if kind in ("integer", "number") and isinstance(value, float):
        return _number(value)
    return value


def _decoded(bare: str, text: str) -> Any:
    """What JSON or else Python makes of it; `text` if neither reads it."""
    try:
        return json.loads(bare, strict=False)
    except UNDECODABLE:
        pass
    try:
        return ast.literal_eval(bare)
    except UNDECODABLE:
        return text


def _number(value: float) -> float | int:
    """Raises ValueError for what no JSON number is."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    return int(value) if value.is_integer() else value


PARSERS: dict[str, Callable[[str, ToolSchemas], list[dict[str, Any]] | None]] = {
    "glm47": _tagged(GLM),
    "laguna": _tagged(GLM),
    "qwen3_coder": _tagged(QWEN_CODER),
    "minimax_m2": _tagged(MINIMAX),
    "mistral": _mistral,
}
ARGUMENT_TAGS = {
    "glm47": ("<arg_value>", "</arg_value>"),
    "laguna": ("<arg_value>", "</arg_value>"),
    "qwen3_coder": ("<parameter=", "</parameter>"),
    "minimax_m2": ("<parameter name=", "</parameter>"),
}
