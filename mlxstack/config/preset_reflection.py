"""Schema of a preset: keys, types, short forms, and words for them."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec.inspect as mi
import msgspec.json
import yaml
from msgspec import Struct

from mlxstack.core.preset import ModelSpec, Preset
from mlxstack.core.units import Unit, bytes_in, seconds_in, tokens_in

# What PyYAML raises for the 99th day of a month, for a number without digits, for `!!bool maybe`.
UNBUILT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
TAG = "tag:yaml.org,2002:"
PLAIN = {f"{TAG}{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}
WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
BROKEN = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)

Keys = tuple[str | int, ...]


class PlainYamlLoader(yaml.SafeLoader):
    """Disables YAML 1.1 implicit types: octal, sexagesimal, dates.

    It would make 8 of `010`, 90 of `1:30`, and a day of a date.
    """


PlainYamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag.removeprefix(TAG) in {"bool", "null"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainYamlLoader.add_implicit_resolver(f"{TAG}int", WHOLE, list("-+0123456789"))
PlainYamlLoader.add_implicit_resolver(f"{TAG}float", BROKEN, list("-+.0123456789"))


PRESET = mi.type_info(Preset)
TOKEN_KEYS = frozenset({"n_ctx", "chunk_size", "quantized_start", "max_tokens", "thinking_budget"})
"""Keys of numbers of tokens."""


class ShortForm(Struct, frozen=True):
    """Short form of amounts: parser, pattern of a JSON schema, example."""

    unit: Unit
    pattern: str
    example: str


TOKENS = ShortForm(tokens_in, "^[0-9]+[kKmM]$", "64k")
BYTES = ShortForm(bytes_in, r"^[0-9]+(\.[0-9]+)? ?[kKmMgGtT]?i?[bB]?$", "20GB")
SECONDS = ShortForm(seconds_in, r"^[0-9]+(\.[0-9]+)? ?[smhdwSMHDW]$", "15m")

RENAMED = {
    "pace.max_bite": "prefill.chunk_size",
    "pace.max_stall_ms": "prefill.max_stall_ms",
    "pace.aging_per_s": "queue.aging_per_s",
    "kv.quantize_from": "kv.quantized_start",
    "server.without_key": "server.allow_unauthenticated",
    "when_to_use": "description",
}
"""Earlier key paths, with today's names."""

NOT_SERVED = {
    "kv.swa_full": "sliding windows are always capped, since saved and parked contexts carry "
    "checkpoints of their windows; remove it",
    "prefix_cache.live_sharing": "every slot holds its own copy of a common prefix, since one copy "
    "for all was no faster; remove it",
}
"""Keys of other servers that no preset has, and why."""


def why_unknown(keys: Keys) -> str:
    """Remedy for an unknown key; "" if there is none."""
    name = ".".join(map(str, keys))
    if name in RENAMED:
        return f"`{name}` is called `{RENAMED[name]}` now"
    if name in NOT_SERVED:
        return f"unknown key `{name}`: {NOT_SERVED[name]}"
    return ""


def json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a preset file, `extends` included, for editors."""
    schema = msgspec.json.schema(Preset)
    form = schema["$defs"][Preset.__name__]
    extends = {"type": "string", "description": "Name or path of the preset that this one changes."}
    form["properties"] = {"extends": extends, **form["properties"]}
    form["anyOf"] = [{"required": ["model"]}, {"required": ["extends"]}]
    for section in (form, schema["$defs"][ModelSpec.__name__]):
        section.pop("required", None)
    _allow_short_forms(form, schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _allow_short_forms(form: dict[str, Any], sections: dict[str, Any]) -> None:
    """Accept the short forms that `normalized` expands."""
    form["properties"]["model"] = {"anyOf": [{"type": "string"}, form["properties"]["model"]]}
    for section in sections.values():
        fields = section.get("properties", {})
        for key, field in fields.items():
            short = short_form(key)
            if short is not None:
                fields[key] = {"anyOf": [field, {"type": "string", "pattern": short.pattern}]}
            elif field.get("type") == "array" and _takes_texts(field.get("items", {})):
                fields[key] = {"anyOf": [field, {"type": "string"}]}


def _takes_texts(items: dict[str, Any]) -> bool:
    return any(kind.get("type") == "string" for kind in items.get("anyOf", [items]))


def short_form(key: str) -> ShortForm | None:
    """Short form of the amounts that a key takes, by its name."""
    if key in TOKEN_KEYS:
        return TOKENS
    if key.endswith("_bytes"):
        return BYTES
    if key.endswith("_s") and not key.endswith("_per_s"):
        return SECONDS
    return None


def at(keys: Keys, shape: mi.Type = PRESET) -> mi.Type | None:
    """Schema at `keys`, or None for an unknown key."""
    for key in keys:
        shape = _section_in(shape)
        below = None
        if isinstance(key, str):
            below = children(shape).get(key)
        if isinstance(shape, mi.VarTupleType) and isinstance(key, int):
            below = shape.item_type
        elif isinstance(shape, mi.DictType):
            below = shape.value_type
        if below is None:
            return None
        shape = below
    return shape


def _texts_in(shape: mi.Type) -> mi.Type:
    """Text among the kinds of a value, else the shape itself."""
    kinds = shape.types if isinstance(shape, mi.UnionType) else ()
    return next((kind for kind in kinds if isinstance(kind, mi.StrType)), shape)


def _section_in(shape: mi.Type) -> mi.Type:
    """Section among the kinds of a value, else the shape itself."""
    kinds = shape.types if isinstance(shape, mi.UnionType) else ()
    return next((kind for kind in kinds if isinstance(kind, mi.StructType)), shape)


def children(shape: mi.Type) -> dict[str, mi.Type]:
    """The keys of a section, in order; empty for anything else."""
    if isinstance(shape, mi.StructType):
        return {field.encode_name: bare(field.type) for field in shape.fields}
    return {}


def bare(shape: mi.Type) -> mi.Type:
    """The shape without its description."""
    if isinstance(shape, mi.Metadata):
        return shape.type
    return shape


def leaves(shape: mi.Type = PRESET, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key path that holds a value rather than a section."""
    for name, below in children(shape).items():
        if isinstance(below, mi.StructType):
            yield from leaves(below, (*keys, name))
        else:
            yield (*keys, name)


def unknown(values: Any, shape: mi.Type = PRESET, keys: Keys = ()) -> Iterator[Keys]:
    """Unknown key paths in `values`, in the order of the file."""
    shape = _section_in(shape)
    if isinstance(values, dict) and isinstance(shape, mi.StructType):
        keys_here = children(shape)
        for name, value in values.items():
            if name in keys_here:
                yield from unknown(value, keys_here[name], (*keys, name))
            else:
                yield (*keys, name)
    elif isinstance(values, list) and isinstance(shape, mi.VarTupleType):
        for place, value in enumerate(values):
            yield from unknown(value, shape.item_type, (*keys, place))
    elif isinstance(values, dict) and isinstance(shape, mi.DictType):
        for name, value in values.items():
            yield from unknown(value, shape.value_type, (*keys, name))


def endless(values: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Key paths of numbers without JSON form: `.inf` and `.nan`."""
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            yield from endless(value, (*keys, key))
    elif isinstance(values, float) and not math.isfinite(values):
        yield keys


def nearest(word: str, names: Sequence[str]) -> str | None:
    """The most similar name, None where none is similar."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), None)


def suggestion(word: str, choices: Iterable[str]) -> str:
    """Suggestion `; did you mean X?`, or else the known keys."""
    names = list(choices)
    if near := nearest(word, names):
        return f"; did you mean `{near}`?"
    if names:
        return f"; there is {', '.join(names)}"
    return ""


def parse(raw: str, shape: mi.Type) -> Any:
    """Parse a typed value; unparsable text stays for a later refusal."""
    if isinstance(shape, mi.UnionType):
        if raw in {"null", "none", ""}:
            return None
        shape = next(kind for kind in shape.types if not isinstance(kind, mi.NoneType))
    if isinstance(shape, mi.StrType | mi.EnumType):
        return raw
    try:
        return yaml.load(raw, PlainYamlLoader)
    except (yaml.YAMLError, RecursionError, *UNBUILT):
        return raw


def allowed(keys: Keys) -> str:
    """Values of a key in words, with an example."""
    short = short_form(str(keys[-1]))
    if short is None:
        return meaning(at(keys))
    return f"{meaning(at(keys))}, such as {short.example}"


def meaning(shape: mi.Type | None) -> str:
    """Allowed values as text: `a whole number from 1 to 256`."""
    match shape:
        case mi.UnionType():
            kinds = [kind for kind in shape.types if not isinstance(kind, mi.NoneType)]
            null = ["null"] if len(kinds) < len(shape.types) else []
            return " or ".join([*map(meaning, kinds), *null])
        case mi.VarTupleType():
            return "a list, each item " + meaning(shape.item_type)
        case mi.StructType():
            return "a section with " + ", ".join(children(shape))
        case mi.DictType(value_type=mi.StructType()):
            return "names, each with " + meaning(shape.value_type)
        case _:
            return _meaning_of_one(shape)


def _meaning_of_one(shape: mi.Type | None) -> str:
    match shape:
        case mi.IntType() | mi.FloatType():
            kind = "a number"
            if isinstance(shape, mi.IntType):
                kind = "a whole number"
            return kind + _bounds(shape)
        case mi.BoolType():
            return "true or false"
        case mi.StrType():
            return "a text"
        case mi.EnumType():
            return "one of " + ", ".join(str(member.value) for member in shape.cls)
        case mi.LiteralType():
            return " or ".join(f"`{value}`" for value in shape.values)
        case _:
            return "a mapping"


def normalized(values: dict[str, Any]) -> dict[str, Any]:
    """Expand short forms.

    `model: ID`, amounts with units, lists of one, `KEY: off`.
    """
    result: dict[str, Any] = _expanded(values, PRESET)
    if isinstance(result.get("model"), str):
        result["model"] = {"id": result["model"]}
    return result


def _shapes_below(shape: mi.Type | None, names: Iterable[str]) -> dict[str, mi.Type]:
    """Schemas of the keys of a section, or of these names."""
    if shape is None:
        return {}
    if isinstance(shape, mi.DictType):
        return dict.fromkeys(names, shape.value_type)
    return children(_section_in(shape))


def _expanded(values: Any, shape: mi.Type | None, key: str = "") -> Any:
    """Values in their long form; others stay for a later refusal."""
    if isinstance(values, dict):
        shapes = _shapes_below(shape, values)
        return {name: _expanded(value, shapes.get(name), name) for name, value in values.items()}
    if values is False and isinstance(shape, mi.EnumType):
        return "off"
    if not isinstance(values, str):
        return values
    if isinstance(shape, mi.VarTupleType):
        if isinstance(_texts_in(shape.item_type), mi.StrType) and values[:1] != "[":
            return [values]
        return values
    short = short_form(key)
    amount = None
    if short is not None and shape is not None:
        amount = short.unit(values)
    return values if amount is None else amount


def shown(value: Any) -> str:
    """A value as people wrote it, cut when long."""
    if isinstance(value, dict | list):
        if isinstance(value, dict):
            return "a section"
        return "a list"
    if value is None:
        return "empty"
    text = yaml.safe_dump(value, width=1000).removesuffix("\n...\n").strip()
    return f"`{text[:60]}`"


def _bounds(shape: mi.IntType | mi.FloatType) -> str:
    low = shape.ge if shape.ge is not None else shape.gt
    parts = []
    if low is not None:
        parts.append(f"above {low:g}" if shape.ge is None else f"from {low:g}")
    if shape.le is not None:
        parts.append(f"to {shape.le:g}")
    elif low is not None and shape.ge is not None:
        parts = [f"of at least {low:g}"]
    if parts:
        return " " + " ".join(parts)
    return ""
