"""JSON types that a schema allows: string, other, or both.

Families that write arguments between tags write text as it is and everything else as JSON, so
that only the schema tells `5` from "5".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

Schema = dict[str, Any]

OTHERS = ("object", "array", "number", "integer", "boolean", "null")
COMBINED = ("anyOf", "oneOf")
ALL = ("allOf", *COMBINED)
NULL = {"type": "null"}
MAX_SEEN = 100
MAX_DEPTH = 8


class SchemaTypes(Struct, frozen=True):
    """Schemas of an argument as text, or else as any value."""

    texts: tuple[Schema, ...] = ()
    others: tuple[Schema, ...] = ()

    @property
    def is_text(self) -> bool:
        """Text, or null at most."""
        return bool(self.texts) and all(one.get("type") == "null" for one in self.others)


def schema_types(schema: Any, root: Schema) -> SchemaTypes:
    """Types that an argument's schema allows; `root` resolves references."""
    return _kinds(schema, root, set())


def _kinds(schema: Any, root: Schema, seen: set[str]) -> SchemaTypes:
    """`seen` are references that count already; a second time they add nothing."""
    if not isinstance(schema, dict) or len(seen) > MAX_SEEN:
        return SchemaTypes(({"type": "string"},), ({"type": list(OTHERS)},))
    reference = str(schema.get("$ref", ""))
    if reference in seen:
        return SchemaTypes()
    seen |= {reference} - {""}
    whole = meant(schema, root)
    if whole is not None:
        return _kinds(whole, root, seen)
    for key in COMBINED:
        if isinstance(schema.get(key), list):
            parts = [_kinds(part, root, seen) for part in schema[key]]
            return SchemaTypes(
                tuple(text for part in parts for text in part.texts),
                tuple(other for part in parts for other in part.others),
            )
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return _listed(listed) if isinstance(listed, list) else _typed(schema)


def meant(schema: Schema, root: Schema, keys: Sequence[str] = ("$ref", "allOf")) -> Schema | None:
    """The schema with its reference, or only choice but null, resolved."""
    for key in keys:
        value = schema.get(key)
        parts = [referred(value, root) or {}] if isinstance(value, str) else value
        choices = [one for one in parts if one != NULL] if isinstance(parts, list) else []
        if len(choices) == 1 and isinstance(choices[0], dict):
            return {**choices[0], **{name: one for name, one in schema.items() if name != key}}
    return None


def properties(parameters: Schema) -> dict[str, tuple[Any, bool]]:
    """Schema of each argument in order, and whether it is required.

    The arguments may stand behind a `$ref`, or in several alternatives.
    """
    known, required = _described(parameters, parameters, MAX_DEPTH)
    return {key: (known.get(key, {}), key in required) for key in (*known, *required)}


def _described(schema: Schema, root: Schema, depth: int) -> tuple[dict[str, Any], list[str]]:
    """Properties of an object, and the names of the required ones."""
    schemas, names = schema.get("properties"), schema.get("required")
    known = dict(schemas) if isinstance(schemas, dict) else {}
    required = [key for key in names if isinstance(key, str)] if isinstance(names, list) else []
    target = referred(str(schema["$ref"]), root) if "$ref" in schema else None
    parts = [("allOf", target)] if target is not None else []
    listed = [(key, schema[key]) for key in ALL if isinstance(schema.get(key), list)]
    parts += [(key, one) for key, several in listed for one in several if isinstance(one, dict)]
    for key, part in parts if depth else ():
        more, needed = _described(part, root, depth - 1)
        known = {**more, **known}
        required += needed if key == "allOf" else []
    return known, required


def declared(parameters: Mapping[str, Any]) -> Schema:
    """Argument schemas with an explicit `type`, for parsers that need one."""
    root = dict(parameters)
    schemas = root.get("properties")
    if not isinstance(schemas, dict):
        return root
    return {**root, "properties": {key: _plain(one, root) for key, one in schemas.items()}}


def _plain(schema: Any, root: Schema) -> Any:
    if isinstance(schema, dict) and isinstance(schema.get("type"), str):
        return schema
    types = schema_types(schema, root)
    if not types.is_text:
        return {"type": "object"}
    return {"type": "string", "nullable": bool(types.others)}


def named_types(schema: Mapping[str, Any], default: Sequence[str] = ()) -> list[str]:
    """Names of the types of a schema."""
    named = schema.get("type", list(default))
    return named if isinstance(named, list) else [named]


def _typed(schema: Schema) -> SchemaTypes:
    types = named_types(schema, ("string", *OTHERS))
    others = [name for name in types if name != "string"]
    kind: Any = others[0] if len(others) == 1 else others
    return SchemaTypes(
        ({**schema, "type": "string"},) if "string" in types else (),
        ({**schema, "type": kind},) if others else (),
    )


def _listed(values: list[Any]) -> SchemaTypes:
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    is_null = others == [None]
    return SchemaTypes(
        ({"enum": texts},) if texts else (),
        ({"type": "null"} if is_null else {"enum": others},) if others else (),
    )


def referred(reference: str, root: Schema) -> Schema | None:
    """Schema that `#/a/b` refers to, if it is one."""
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) and name else target
    return target if isinstance(target, dict) else None
