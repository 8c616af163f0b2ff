"""YAML with source locations; refuses duplicate keys."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from mlxstack.core.errors import SetupError

# What PyYAML raises for the 99th day of a month, for a number without digits, for `!!bool maybe`.
UNBUILT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
MOST_VALUES = 100_000
"""A few aliases of aliases make more than any memory holds."""

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
    first: [(tag, form) for tag, form in known if tag.removeprefix(TAG) in {"bool", "null"}]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainYamlLoader.add_implicit_resolver(f"{TAG}int", WHOLE, list("-+0123456789"))
PlainYamlLoader.add_implicit_resolver(f"{TAG}float", BROKEN, list("-+.0123456789"))


class SourceLocation(Struct, frozen=True):
    """Source of a value: file and line, option, or variable.

    Relative paths in the value are meant from `folder`.
    """

    source: str
    folder: Path
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class SourcedDocument(Struct, frozen=True):
    """Mapping of values, and the source of every key path."""

    values: dict[str, Any]
    locations: dict[Keys, SourceLocation]

    def location(self, keys: Keys) -> SourceLocation:
        """The mark of `keys`, or of its nearest parent that has one."""
        while keys not in self.locations:
            keys = keys[:-1]
        return self.locations[keys]


def dotted(keys: Keys) -> str:
    """`("slots", "count")` as `slots.count`, list positions in brackets."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


def read_yaml(path: Path) -> SourcedDocument:
    """Document of a file. Raises SetupError with file and line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise SetupError(f"{path} cannot be read: {why}") from why
    return parsed_yaml(text, path)


def parsed_yaml(text: str, path: Path) -> SourcedDocument:
    """Document of a file's text. Raises SetupError with the line."""
    top = SourceLocation(str(path), path.parent, None)
    try:
        return _document(text, top)
    except yaml.YAMLError as why:
        raise SetupError(f"{path}{_place(why)}: this is not YAML: {_problem(why)}") from why
    except RecursionError:
        raise SetupError(f"{path}: this is nested deeper than a preset can be") from None
    except UNBUILT as why:
        raise SetupError(f"{path}: a value makes no sense: {why}") from why


def _document(text: str, top: SourceLocation) -> SourcedDocument:
    loader = PlainYamlLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise SetupError(f"{top}: a preset is a mapping such as `model: {{id: demo}}`")
        marks = {(): top} | dict(islice(_state(node, (), top), MOST_VALUES + 1))
        if len(marks) > MOST_VALUES:
            raise SetupError(f"{top}: there are too many values, more than {MOST_VALUES}")
        return SourcedDocument(loader.construct_document(node), marks)
    finally:
        loader.dispose()


def merge(below: SourcedDocument, above: SourcedDocument) -> SourcedDocument:
    """`above` wins; mappings are merged, lists are replaced."""
    kept = {keys: mark for keys, mark in below.locations.items() if _survives(above.values, keys)}
    return SourcedDocument(_merged(below.values, above.values), kept | above.locations)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        out[key] = _merged(old, value) if both and old is not None else value
    return out


def _survives(above: dict[str, Any], keys: Keys) -> bool:
    here: Any = above
    for key in keys:
        if not isinstance(here, dict):
            return False
        if key not in here:
            return True
        here = here[key]
    return isinstance(here, dict)


def _state(
    node: yaml.Node, keys: Keys, top: SourceLocation
) -> Iterator[tuple[Keys, SourceLocation]]:
    if node.tag not in PLAIN:
        raise SetupError(
            f"{top.source}:{node.start_mark.line + 1}: `{dotted(keys)}` is tagged as "
            f"`{node.tag.removeprefix(TAG)}`; write it without a tag"
        )
    if isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(node, keys, top)
    elif isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            yield (*keys, at), SourceLocation(top.source, top.folder, item.start_mark.line + 1)
            yield from _state(item, (*keys, at), top)


def _walk_mapping(
    node: yaml.MappingNode, keys: Keys, top: SourceLocation
) -> Iterator[tuple[Keys, SourceLocation]]:
    seen: dict[str, int] = {}
    for name, value in node.value:
        line = name.start_mark.line + 1
        key = str(name.value) if isinstance(name, yaml.ScalarNode) else "?"
        here = dotted((*keys, key))
        if not isinstance(name, yaml.ScalarNode) or name.tag != "tag:yaml.org,2002:str":
            raise SetupError(f"{top.source}:{line}: the key `{here}` must be a plain text")
        if key in seen:
            raise SetupError(
                f"{top.source}:{line}: `{here}` is given twice, first in line {seen[key]}; keep one"
            )
        seen[key] = line
        yield (*keys, key), SourceLocation(top.source, top.folder, line)
        yield from _state(value, (*keys, key), top)


def _place(why: yaml.YAMLError) -> str:
    mark = getattr(why, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _problem(why: yaml.YAMLError) -> str:
    return str(getattr(why, "problem", None) or str(why).splitlines()[0])
