"""Largest part of a JSON schema that a grammar can enforce.

One odd keyword (a type that does not exist, null in place of a schema, a regular expression of
another language) leaves the rest of its schema as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from mlxstack.text.grammar.enforced_schema import NAMED, references
from mlxstack.text.schema_types import Schema

Problem = Callable[[Any], str | None]
"""Reason why a schema has no grammar: None where it has one, "" where that was not tried."""
MAX_PROBES = 400
DEFINITIONS = ("$defs", "definitions")
FIRST = (*DEFINITIONS, "type", "required", "properties")
LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})


class LeftOut(Struct, frozen=True):
    """Part without a grammar; `reason` is "" where it was not tried."""

    path: str
    reason: str


class Enforceable(Struct, frozen=True):
    """The enforceable `schema`, and the parts left out."""

    schema: Schema
    left_out: tuple[LeftOut, ...] = ()


def enforceable(
    schema: Schema, problem: Problem, is_over: Callable[[], bool] = lambda: False
) -> Enforceable:
    """Largest part of a schema without a `problem`; {} must have none.

    Nothing more is tried once the time `is_over`.
    """
    search = _Search(problem, is_over, references(schema))
    fitting = search.largest(schema, lambda part: part, "")
    return Enforceable(fitting, tuple(search.left_out))


class _Search:
    """Assembles a schema from the parts that fit.

    A part is tried beside those that fit, so that a reason is about this part alone. A definition
    is tried as a property refers to it, if something does: others are not compiled.
    """

    def __init__(self, problem: Problem, is_over: Callable[[], bool], targets: set[str]) -> None:
        self._problem_of = problem
        self._is_over = is_over
        self._targets = targets
        self._n_probes = 0
        self.left_out: list[LeftOut] = []

    def largest(self, schema: Any, around: Callable[[Any], Schema], path: str) -> Any:
        """Largest part of a schema inside of `around`."""
        reason = self._problem(around, schema)
        if reason is None:
            return schema
        if not isinstance(schema, dict):
            self.left_out.append(LeftOut(path, reason))
            return {}
        fitting: Schema = {}
        for key in sorted(schema, key=_order):
            within = _within(around, fitting, key)
            if not path and key in DEFINITIONS and isinstance(schema[key], dict):
                within = self._used(key, schema[key], within)
            for part in self._parts(key, schema[key], within, f"{path}/{key}"):
                fitting[key] = part
        return fitting

    def _used(
        self, key: str, definitions: Schema, around: Callable[[Any], Schema]
    ) -> Callable[[Any], Schema]:
        paths = (f"#/{key}/{name}" for name in definitions)
        uses = {target: {"$ref": target} for target in paths if target in self._targets}
        return lambda part: {**around(part), "properties": uses}

    def _parts(
        self, key: str, value: Any, around: Callable[[Any], Schema], path: str
    ) -> Iterator[Any]:
        """The part of a keyword's value that fits, if any."""
        reason = self._problem(around, value)
        if reason is None:
            yield value
        elif key in NAMED and isinstance(value, dict) and self._is_fit(around, _blank(value)):
            inner = _blank(value)
            for name, member in value.items():
                inner[name] = self.largest(member, _within(around, inner, name), f"{path}/{name}")
            yield inner
        elif isinstance(value, list):
            yield from self._items(key, value, around, LeftOut(path, reason))
        elif isinstance(value, dict) and self._is_fit(around, {}):
            yield self.largest(value, around, path)
        else:
            self.left_out.append(LeftOut(path, reason))

    def _items(
        self, key: str, items: list[Any], around: Callable[[Any], Schema], whole: LeftOut
    ) -> Iterator[Any]:
        """The items of a list that fit, if any."""
        fitting: list[Any] = []
        for index, item in enumerate(items):
            path = f"{whole.path}/{index}"
            if key in LISTED and self._is_fit(around, [*fitting, {}]):
                fitting.append(self.largest(item, lambda part: around([*fitting, part]), path))
                continue
            reason = self._problem(around, [*fitting, item])
            if reason is None:
                fitting.append(item)
            else:
                self.left_out.append(LeftOut(path, reason))
        if fitting:
            yield fitting
        elif not items:
            self.left_out.append(whole)

    def _problem(self, around: Callable[[Any], Schema], part: Any) -> str | None:
        """Reason why a part does not fit; "" for an untried one."""
        self._n_probes += 1
        if self._n_probes > MAX_PROBES or self._is_over():
            return ""
        return self._problem_of(around(part))

    def _is_fit(self, around: Callable[[Any], Schema], part: Any) -> bool:
        return self._problem(around, part) is None


def _blank(schemas: Schema) -> Schema:
    return {name: {} for name in schemas}


def _within(around: Callable[[Any], Schema], fitting: Schema, key: str) -> Callable[[Any], Schema]:
    return lambda part: around({**fitting, key: part})


def _order(key: str) -> tuple[int, str]:
    """Definitions and types come before what refers to them."""
    return (FIRST.index(key) if key in FIRST else len(FIRST), "")
