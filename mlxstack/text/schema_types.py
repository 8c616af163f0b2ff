"""JSON types that a schema allows: string, other, or both.

Families that write arguments between tags write text as it is and everything else as JSON, so
that only the schema tells `5` from "5".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

Schema = dict[str, Any]

OTHERS = ("object", "array", "number", "integer", "boolean", "null")
COMBINED = ("anyOf", "oneOf")
ALL = ("allOf", *COMBINED)
NULL = {"type": "null"}
MAPPINGS = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose values are schemas by name."""
MAX_SEEN = 100
MAX_STEPS = 20_000
"""Keywords, choices and constants that are read for the types of one tool."""


class SchemaTypes(Struct, frozen=True):
    """Schemas of an argument as text, or else as any value."""

    texts: tuple[Schema, ...] = ()
    others: tuple[Schema, ...] = ()

    @property
    def is_text(self) -> bool:
        """Text, or null at most."""
        return bool(self.texts) and all(schema.get("type") == "null" for schema in self.others)


ANYTHING = SchemaTypes(({"type": "string"},), ({"type": list(OTHERS)},))


def joined_types(alternatives: Iterable[SchemaTypes]) -> SchemaTypes:
    """Types of which a value has one."""
    types = tuple(alternatives)
    texts = tuple(schema for part in types for schema in part.texts)
    return SchemaTypes(texts, tuple(schema for part in types for schema in part.others))


def schema_types(schema: Any, root: Schema) -> SchemaTypes:
    """Types that an argument's schema allows; `root` resolves references."""
    return _Types(root).of(schema)


def argument_types(root: Schema) -> dict[str, SchemaTypes]:
    """Types of the arguments of a tool, in bounded work."""
    types = _Types(root)
    return {key: types.of(schema) for key, (schema, _) in properties(root).items()}


class _Types:
    """Types by schemas that may refer to parts of `root`.

    After `MAX_STEPS` keywords and choices a schema allows anything.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._n_left = MAX_STEPS

    def of(self, schema: Any) -> SchemaTypes:
        """Types of a schema, whose references count once."""
        return self._of(schema, set())

    def _of(self, schema: Any, seen: set[str]) -> SchemaTypes:
        """`seen` are references that count already; a second time they add nothing."""
        if not isinstance(schema, dict) or len(seen) > MAX_SEEN or self._n_left <= 0:
            return ANYTHING
        schema = normal(schema)
        self._n_left -= 1 + len(schema)
        reference = str(schema.get("$ref", ""))
        if reference in seen:
            return SchemaTypes()
        seen |= {reference} - {""}
        whole = meant(schema, self._root)
        if whole is not None:
            return self._of(whole, seen)
        for key in COMBINED:
            if isinstance(schema.get(key), list):
                parts = schema[key][: max(1, self._n_left)]
                return joined_types([self._of(part, seen) for part in parts])
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list):
            return _typed(schema)
        self._n_left -= len(listed)
        return _listed(listed)


def meant(schema: Schema, root: Schema, keys: Sequence[str] = ("$ref", "allOf")) -> Schema | None:
    """The schema with its reference, or only choice but null, resolved."""
    for key in keys:
        value = schema.get(key)
        parts = [referred(value, root) or {}] if isinstance(value, str) else value
        choices = [part for part in parts if part != NULL] if isinstance(parts, list) else []
        if len(choices) == 1 and isinstance(choices[0], dict):
            return {**choices[0], **{name: part for name, part in schema.items() if name != key}}
    return None


def properties(parameters: Schema) -> dict[str, tuple[Any, bool]]:
    """Schema of each argument in order, and whether it is required.

    The arguments may stand behind a `$ref`, or in several alternatives. Each schema is read once.
    """
    merged: dict[str, Any] = {}
    required: dict[str, None] = {}
    seen: set[tuple[int, bool]] = set()
    # Schemas to read, the next one last, and whether all objects are of them.
    waiting = [(parameters, True)]
    while waiting:
        schema, is_certain = waiting.pop()
        if (id(schema), is_certain) in seen or (id(schema), True) in seen:
            continue
        seen.add((id(schema), is_certain))
        schemas = schema.get("properties")
        own: dict[str, Any] = schemas if isinstance(schemas, dict) else {}
        for key in reversed(own):
            # What is nearer to the tool counts, and comes later.
            nearest = merged.pop(key, own[key])
            merged[key] = nearest
        names = schema.get("required")
        if is_certain and isinstance(names, list):
            required |= dict.fromkeys(key for key in names if isinstance(key, str))
        waiting += reversed(list(_parts(schema, parameters, is_certain=is_certain)))
    merged = dict(reversed(merged.items()))
    return {key: (merged.get(key, {}), key in required) for key in (*merged, *required)}


def _parts(schema: Schema, root: Schema, *, is_certain: bool) -> Iterator[tuple[Schema, bool]]:
    """Schemas of the same object, and whether they certainly hold."""
    target = referred(str(schema["$ref"]), root) if "$ref" in schema else None
    if target is not None:
        yield target, is_certain
    for key in ALL:
        several = schema.get(key)
        for part in several if isinstance(several, list) else ():
            if isinstance(part, dict):
                yield part, is_certain and key == "allOf"


def declared(parameters: Mapping[str, Any]) -> Schema:
    """Argument schemas with an explicit `type`, for parsers that need one."""
    root = dict(parameters)
    schemas = root.get("properties")
    if not isinstance(schemas, dict):
        return root
    types = _Types(root)
    return {**root, "properties": {key: _plain(schema, types) for key, schema in schemas.items()}}


def _plain(schema: Any, all_types: _Types) -> Any:
    if isinstance(schema, dict) and isinstance(schema.get("type"), str):
        return schema
    types = all_types.of(schema)
    if not types.is_text:
        return {"type": "object"}
    return {"type": "string", "nullable": bool(types.others)}


def normal(schema: Schema) -> Schema:
    """Schema in the spelling of JSON Schema.

    Some programs write null for an absent keyword, a list for an object without members (PHP) or
    the reverse (Lua), and `nullable` (OpenAPI).
    """
    absent = [key for key, value in schema.items() if value is None and key != "const"]
    blank: Schema = {key: {} for key in MAPPINGS if schema.get(key) == []}
    if schema.get("required") == {}:
        blank["required"] = []
    if not absent and not blank and schema.get("nullable") is not True:
        return schema
    whole = {key: value for key, value in {**schema, **blank}.items() if key not in absent}
    return _with_null(whole) if whole.pop("nullable", False) is True else whole


def _with_null(schema: Schema) -> Schema:
    """Schema whose values may be null, too."""
    whole = dict(schema)
    if "const" in whole:
        whole["enum"] = [whole.pop("const")]
    if isinstance(whole.get("enum"), list) and None not in whole["enum"]:
        whole["enum"] = [*whole["enum"], None]
    if "type" in whole:
        types = named_types(whole)
        return {**whole, "type": types if "null" in types else [*types, "null"]}
    if any(key in whole for key in ("$ref", *ALL)):
        return {"anyOf": [whole, NULL]}
    return whole


def named_types(schema: Mapping[str, Any], default: Sequence[str] = ()) -> list[str]:
    """Names of the types of a schema."""
    named = schema.get("type", list(default))
    if isinstance(named, list):
        return named
    return [named]


def _typed(schema: Schema) -> SchemaTypes:
    types = named_types(schema, ("string", *OTHERS))
    kinds = [name for name in types if name != "string"]
    kind: Any = kinds[0] if len(kinds) == 1 else kinds
    return SchemaTypes(
        ({**schema, "type": "string"},) if "string" in types else (),
        ({**schema, "type": kind},) if kinds else (),
    )


def _listed(values: list[Any]) -> SchemaTypes:
    texts = [value for value in values if isinstance(value, str)]
    remaining = [value for value in values if not isinstance(value, str)]
    is_null = remaining == [None]
    return SchemaTypes(
        ({"enum": texts},) if texts else (),
        ({"type": "null"} if is_null else {"enum": remaining},) if remaining else (),
    )


def referred(reference: str, root: Schema) -> Schema | None:
    """Schema that `#/a/b` refers to, if it is one."""
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name:
            # A reference is a part of a URL.
            target = target.get(name, target.get(unquote(name)))
        elif isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and int(name) < len(target) else None
    if isinstance(target, dict):
        return target
    return None
