"""JSON bodies that mostly fit a Struct, with everything that may stand in them."""

import json
import re
from typing import Any

from msgspec import inspect

from tests.fuzz.dice import ODD, Dice

DEEP = 6
WORDS = (
    *ODD, "user", "assistant", "system", "tool", "developer", "text", "function", "function_call",
    "tool_use", "tool_result", "input_text", "image_url", "json_schema", "json_object", "auto",
    "required", "none", "any", "message", "reasoning", "thinking", "enabled", "disabled",
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "low",
    "x-anthropic-billing-header: a=b;", 'root ::= "a"', "start: /a+/", "call_1", "weather",
)  # fmt: skip
SCHEMA_KEYS = (
    "type", "properties", "required", "items", "enum", "const", "$ref", "$defs", "pattern", "anyOf",
    "allOf", "not", "minLength", "maximum", "additionalProperties", "format", "name", "input",
)  # fmt: skip
SCHEMA_WORDS = (*ODD, "object", "array", "string", "integer", "#", "#/$defs/a", "(a+)+$", ".*", "a")


DEEP_HERE = re.compile(rb'"@([0-9]+)([\[{])"')


def body(kind: type, dice: Dice) -> bytes:
    """JSON for this Struct; sometimes cut, or not JSON at all."""
    if dice.chance(4):
        return dice.rest()
    text = json.dumps(_spell(inspect.type_info(kind), dice, 0)).encode()
    text = DEEP_HERE.sub(_dug, text)
    return text[: dice.below(len(text) + 1)] if dice.chance(4) else text


def _spell(kind: Any, dice: Dice, depth: int) -> Any:
    if dice.chance(7) or depth > DEEP:
        return anything(dice, depth)
    match kind:
        case inspect.StructType():
            value = _struct(kind, dice, depth)
        case inspect.ListType() | inspect.VarTupleType():
            value = [_spell(kind.item_type, dice, depth + 1) for _ in range(dice.below(4))]
        case inspect.DictType():
            keys = [dice.pick(SCHEMA_KEYS) for _ in range(dice.below(4))]
            value = {key: anything(dice, depth + 1) for key in keys}
        case inspect.UnionType():
            value = _spell(dice.pick(kind.types), dice, depth)
        case inspect.LiteralType():
            value = dice.pick(kind.values)
        case inspect.EnumType():
            value = dice.pick([member.value for member in kind.cls])
        case _:
            value = _scalar(kind, dice, depth)
    return value


def _scalar(kind: Any, dice: Dice, depth: int) -> Any:
    match kind:
        case inspect.StrType():
            return dice.text(WORDS)
        case inspect.BoolType():
            return dice.chance(50)
        case inspect.IntType() | inspect.FloatType():
            return dice.number()
        case inspect.NoneType():
            return None
    return anything(dice, depth)


def _struct(kind: inspect.StructType, dice: Dice, depth: int) -> dict[str, Any]:
    fields = {}
    for field in kind.fields:
        if field.required or dice.chance(12):
            fields[field.encode_name] = _spell(field.type, dice, depth + 1)
    tag = kind.tag_field and {kind.tag_field: kind.tag}
    return {**(tag or {}), **fields}


def anything(dice: Dice, depth: int) -> Any:
    """Any JSON; much of it looks like a schema."""
    choice = dice.below(9) if depth <= DEEP else dice.below(5)
    if choice < 5:
        return (None, dice.chance(50), dice.number(), *(dice.text(SCHEMA_WORDS),) * 2)[choice]
    if choice == 5:
        return [anything(dice, depth + 1) for _ in range(dice.below(5))]
    if choice == 6:
        return _nested(dice)
    keys = [dice.pick(SCHEMA_KEYS) for _ in range(dice.below(5))]
    return {key: anything(dice, depth + 1) for key in keys}


def _nested(dice: Dice) -> str:
    """Stands for something deeper than any honest body, and than Python's own JSON can write."""
    return f"@{dice.pick((3, 40, 400, 5000))}{dice.pick('[{')}"


def _dug(match: re.Match[bytes]) -> bytes:
    n = int(match[1])
    kind = match[2]
    opening, closing = (b"[", b"]") if kind == b"[" else (b'{"properties":', b"}")
    return opening * n + b"1" + closing * n
