"""Fills in missing schema keys of tools for templates that need them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Tool
from mlxstack.text.schema_types import NULL, OTHERS, meant, named_types
from mlxstack.text.template.adaptation import (
    PROPERTY_DEFAULTS,
    SCHEMA_DEFAULTS,
    TemplateCapabilities,
)

MAX_DEPTH = 8
MAX_REFERENCES = 100
MAX_EXPANDED = 25_000
"""Keywords and items behind references that the tools of a request may have in all."""
DEFINITIONS = ("$defs", "definitions")
CHOICES = ("anyOf", "oneOf", "allOf")


def completed_tools(tools: Iterable[Tool], capabilities: TemplateCapabilities) -> tuple[Tool, ...]:
    """Tools whose parameters have the keys that the template requires."""
    steps = Expansion()
    return tuple(
        replace(tool, parameters=completed(tool.parameters, capabilities, steps)) for tool in tools
    )


class Expansion:
    """Work that references of a request's tools may add. Single owner.

    `n_left` counts the keywords and items behind references.
    """

    def __init__(self) -> None:
        self.n_left = MAX_EXPANDED
        self.n_references = 0

    def follows(self) -> bool:
        """Whether another reference of this tool is followed."""
        self.n_references += 1
        return self.n_references <= MAX_REFERENCES and self.n_left > 0


def completed(
    parameters: dict[str, Any],
    capabilities: TemplateCapabilities,
    expansion: Expansion | None = None,
) -> dict[str, Any]:
    """Tool parameters with the keys that the template requires.

    Where it follows no references and alternatives, each property is what it most likely is.
    """
    if not (capabilities.takes_references and capabilities.shows_references):
        own = {key: part for key, part in parameters.items() if key not in DEFINITIONS}
        # No model reads a schema of so many levels.
        with suppress(RecursionError):
            expansion = expansion or Expansion()
            expansion.n_references = 0
            parameters = _resolved(own, parameters, (), expansion)
    whole: dict[str, Any] = _with_defaults(parameters, capabilities.schema_keys, SCHEMA_DEFAULTS)
    properties = whole.get("properties")
    if not isinstance(properties, dict):
        return whole
    if not capabilities.takes_references:
        properties = {key: _plain(part, MAX_DEPTH) for key, part in properties.items()}
    properties = {
        key: _with_defaults(part, capabilities.property_keys, PROPERTY_DEFAULTS)
        for key, part in properties.items()
    }
    return {**whole, "properties": properties}


def _with_defaults(schema: Any, keys: Iterable[str], defaults: dict[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    # PHP writes an object without keys as a list.
    missing = {key: defaults[key] for key in sorted(keys) if schema.get(key) in (None, [])}
    return {**schema, **missing} if missing else schema


def _resolved(
    schema: Any, root: dict[str, Any], seen: tuple[str, ...], expansion: Expansion
) -> Any:
    """A schema without references, except to what is around them."""
    if seen and expansion.n_left <= 0:
        return schema
    if isinstance(schema, list):
        expansion.n_left -= len(schema) if seen else 0
        return [_resolved(part, root, seen, expansion) for part in schema]
    if not isinstance(schema, dict):
        return schema
    expansion.n_left -= 1 + len(schema) if seen else 0
    path = str(schema.get("$ref", ""))
    whole = meant(schema, root, ("$ref", *CHOICES))
    if whole is not None and path not in seen and expansion.follows():
        return _resolved(whole, root, (*seen, path) if path else seen, expansion)
    return {name: _resolved(part, root, seen, expansion) for name, part in schema.items()}


def _plain(schema: Any, depth: int) -> dict[str, Any]:
    """A schema with one known `type`, at every level."""
    if not isinstance(schema, dict) or depth == 0:
        return {"type": "string"}
    plain = _chosen(schema, depth)
    plain["type"] = _type(plain)
    if "enum" in plain and not isinstance(plain.get("default", ""), str):
        # Some templates join the default of a choice to a text.
        plain["default"] = json.dumps(plain["default"])
    if isinstance(properties := plain.get("properties"), dict):
        plain["properties"] = {k: _plain(part, depth - 1) for k, part in properties.items()}
    if plain["type"] == "array":
        plain["items"] = _plain(plain.get("items", {}), depth - 1)
    if plain["type"] == "object" or isinstance(plain.get("additionalProperties"), dict):
        plain["additionalProperties"] = _plain(plain.get("additionalProperties"), depth - 1)
    return plain


def _chosen(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    """Keywords of a schema and of its first choices, the nearest first."""
    plain = {key: part for key, part in schema.items() if key not in (*CHOICES, "$ref")}
    for choice in CHOICES:
        options = schema.get(choice)
        first = next((part for part in options or () if part != NULL), None)
        if first is None:
            continue
        if isinstance(first, dict) and depth > 1:
            inner = _chosen(first, depth - 1)
            plain = {**inner, "type": _type(inner), **plain}
        else:
            plain = {"type": "string", **plain}
    return plain


def _type(schema: dict[str, Any]) -> str:
    for kind in named_types(schema):
        if kind in ("string", *OTHERS[:-1]):
            return str(kind)
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    return "string"
