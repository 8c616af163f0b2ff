"""Requests whose caller is given by its fields."""

from typing import Any

from mlxstack.core.request import Caller

FIELDS = frozenset(Caller.__struct_fields__)


def with_caller(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request, those of its caller as one value."""
    caller = {name: value for name, value in fields.items() if name in FIELDS}
    return {name: value for name, value in fields.items() if name not in FIELDS} | {
        "caller": Caller(**caller)
    }
