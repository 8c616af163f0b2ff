"""Formats of an answer that a body asks for."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.schema_grammar import ResponseConstraint

SCHEMA_KEYS = {"type", "properties", "anyOf", "$ref"}
GUIDED = ("json", "regex", "choice", "grammar")
"""Kinds of vLLM's fields `guided_*`."""


class StructuredOutputs(TypedDict, total=False):
    """vLLM's constraint of an answer, in the first field that is given."""

    json: dict[str, Any] | str | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    json_object: bool | None


class ResponseFormat(Struct):
    """Output format; `schema` next to `json_object` is llama-server's form."""

    type: str | None = None
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


def field_constraint(
    grammar: str | None,
    json_schema: dict[str, Any] | None,
    structured_outputs: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> ResponseConstraint | None:
    """Constraint by the fields of llama-server and vLLM. Raises BadRequest.

    `guided` are vLLM's older fields `guided_*`, by what follows in their names.
    """
    if grammar:
        return ResponseConstraint(grammar=grammar, param="grammar")
    if json_schema is not None:
        return ResponseConstraint(json_schema, param="json_schema")
    outputs: Mapping[str, Any] = structured_outputs or {}
    return _structured(outputs, "structured_outputs.") or _structured(guided, "guided_")


def _structured(fields: Mapping[str, Any], prefix: str) -> ResponseConstraint | None:
    """Constraint of the first field that is set. Raises BadRequest."""
    kind = next((name for name, value in fields.items() if value not in (None, False)), "")
    value = fields.get(kind)
    param = f"{prefix}{kind}"
    match kind:
        case "":
            return None
        case "regex":
            return ResponseConstraint(regex=value, param=param)
        case "choice":
            return ResponseConstraint(regex="|".join(map(re.escape, value or ())), param=param)
        case "grammar":
            return ResponseConstraint(grammar=value, param=param)
        case "json":
            return ResponseConstraint(_schema(value, param), param=param)
    return ResponseConstraint({}, param=param)


def _schema(schema: Any, param: str) -> Any:
    """Schema, which may be the text of one. Raises BadRequest."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{param} is not a valid JSON schema: {error}", param) from None


def format_constraint(spec: ResponseFormat | None, param: str) -> ResponseConstraint | None:
    """Constraint of a format by its schema, None for text.

    The schema is in `json_schema`, beside it, or in its place. Raises BadRequest for a schema that
    is none, and for an unknown type.
    """
    if spec is None or spec.type in (None, "text"):
        return None
    if spec.type not in ("json_object", "json_schema"):
        raise BadRequest(
            f"{param}.type is {spec.type!r}; known are text, json_object, json_schema",
            f"{param}.type",
        )
    json_schema = spec.json_schema or {}
    schema = json_schema.get("schema") or spec.schema or {}
    if not schema and SCHEMA_KEYS & json_schema.keys():
        schema = json_schema
    if not isinstance(schema, dict):
        raise BadRequest(f"{param}: the schema must be an object, got {schema!r:.20}", param)
    return ResponseConstraint(schema, param=param)


def format_instruction(constraint: ResponseConstraint | None) -> tuple[Message, ...]:
    """Instruction to answer in a JSON format; none without one."""
    if constraint is None:
        return ()
    line = "Answer with one JSON object and nothing else."
    if constraint.schema:
        schema = json.dumps(constraint.schema, ensure_ascii=False)
        line += f" It must match this JSON schema: {schema}"
    return (Message(Role.SYSTEM, line),)
