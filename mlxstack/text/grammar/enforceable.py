"""Largest part of a JSON schema that a grammar can enforce.

One odd keyword (a type that does not exist, null in place of a schema, a regular expression of
another language) leaves the rest of its schema as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from mlxstack.text.grammar.enforced_schema import NAMED
from mlxstack.text.schema_types import Schema

Fits = Callable[[Any], bool]
MAX_PROBES = 400
FIRST = ("$defs", "definitions", "type", "required", "properties")
LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})


class Enforceable(Struct, frozen=True):
    """The enforceable `schema`, and the paths of the parts left out."""

    schema: Schema
    left_out: tuple[str, ...] = ()


def enforceable(schema: Schema, fits: Fits) -> Enforceable:
    """Largest part of a schema that `fits`; {} must fit."""
    search = _Search(fits)
    made = search.largest(schema, lambda one: one, "")
    return Enforceable(made, tuple(search.left_out))


class _Search:
    """Assembles a schema from the parts that fit."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self._n_probes = 0
        self.left_out: list[str] = []

    def largest(self, schema: Any, around: Callable[[Any], Schema], path: str) -> Any:
        """Largest part of a schema inside of `around`."""
        if self._is_fit(around(schema)):
            return schema
        if not isinstance(schema, dict):
            self.left_out.append(path)
            return {}
        made: Schema = {}
        for key in sorted(schema, key=_order):
            for part in self._parts(key, schema[key], _within(around, made, key), f"{path}/{key}"):
                made[key] = part
        return made

    def _parts(
        self, key: str, value: Any, around: Callable[[Any], Schema], path: str
    ) -> Iterator[Any]:
        """The part of a keyword's value that fits, if any."""
        if self._is_fit(around(value)):
            yield value
        elif key in NAMED and isinstance(value, dict) and self._is_fit(around(_blank(value))):
            inner = _blank(value)
            for name, one in value.items():
                inner[name] = self.largest(one, _within(around, inner, name), f"{path}/{name}")
            yield inner
        elif isinstance(value, list):
            yield from self._items(key, value, around, path)
        elif isinstance(value, dict) and self._is_fit(around({})):
            yield self.largest(value, around, path)
        else:
            self.left_out.append(path)

    def _items(
        self, key: str, items: list[Any], around: Callable[[Any], Schema], path: str
    ) -> Iterator[Any]:
        """The items of a list that fit, if any."""
        made: list[Any] = []
        for at, item in enumerate(items):
            if key in LISTED and self._is_fit(around([*made, {}])):
                made.append(self.largest(item, lambda one: around([*made, one]), f"{path}/{at}"))
            elif self._is_fit(around([*made, item])):
                made.append(item)
            else:
                self.left_out.append(f"{path}/{at}")
        if made:
            yield made
        elif not items:
            self.left_out.append(path)

    def _is_fit(self, schema: Any) -> bool:
        self._n_probes += 1
        return self._n_probes <= MAX_PROBES and self._fits(schema)


def _blank(schemas: Schema) -> Schema:
    return {name: {} for name in schemas}


def _within(around: Callable[[Any], Schema], made: Schema, key: str) -> Callable[[Any], Schema]:
    return lambda one: around({**made, key: one})


def _order(key: str) -> tuple[int, str]:
    """Definitions and types come before what refers to them."""
    return (FIRST.index(key) if key in FIRST else len(FIRST), "")
