"""YAML with the source of every value."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from mlxstack.config import preset_reflection as schema
from mlxstack.config.preset_reflection import PLAIN, TAG, Keys, PlainYamlLoader
from mlxstack.core.errors import SetupError

MAX_VALUES = 100_000
"""A few aliases of aliases make more than any memory holds."""


class SourceLocation(Struct, frozen=True):
    """Source of a value: file and line, option, or variable.

    Relative paths in the value are meant from `folder`.
    """

    source: str
    folder: Path
    line: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return self.source
        return f"{self.source}:{self.line}"


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
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    return parsed_yaml(text, path)


def parsed_yaml(text: str, path: Path) -> SourcedDocument:
    """Document of a file's text. Raises SetupError with the line."""
    top = SourceLocation(str(path), path.parent, None)
    try:
        return _document(text, top)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SetupError(f"{path}{_place(error)}: this is not YAML: {problem}") from error
    except RecursionError:
        raise SetupError(f"{path}: this is nested deeper than a preset can be") from None
    except schema.UNBUILT as error:
        raise SetupError(f"{path}: invalid value: {error}") from error


def _document(text: str, top: SourceLocation) -> SourcedDocument:
    loader = PlainYamlLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise SetupError(f"{top}: a preset is a mapping such as `model: {{id: demo}}`")
        locations = {(): top} | dict(islice(_locations(node, (), top), MAX_VALUES + 1))
        if len(locations) > MAX_VALUES:
            raise SetupError(f"{top}: there are too many values, more than {MAX_VALUES}")
        return SourcedDocument(loader.construct_document(node), locations)
    finally:
        loader.dispose()


def merge(below: SourcedDocument, above: SourcedDocument) -> SourcedDocument:
    """`above` wins; mappings are merged, lists are replaced."""
    locations = {
        keys: mark for keys, mark in below.locations.items() if _survives(above.values, keys)
    }
    return SourcedDocument(_merged(below.values, above.values), locations | above.locations)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            out[key] = _merged(old, value)
        else:
            out[key] = value
    return out


def _survives(above: dict[str, Any], keys: Keys) -> bool:
    value: Any = above
    for key in keys:
        if not isinstance(value, dict):
            return False
        if key not in value:
            return True
        value = value[key]
    return isinstance(value, dict)


def _locations(
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
        for position, item in enumerate(node.value):
            yield (
                (*keys, position),
                SourceLocation(top.source, top.folder, item.start_mark.line + 1),
            )
            yield from _locations(item, (*keys, position), top)


def _walk_mapping(
    node: yaml.MappingNode, keys: Keys, top: SourceLocation
) -> Iterator[tuple[Keys, SourceLocation]]:
    seen: dict[str, int] = {}
    for name, value in node.value:
        line = name.start_mark.line + 1
        key = "?"
        if isinstance(name, yaml.ScalarNode):
            key = str(name.value)
        path = dotted((*keys, key))
        if not isinstance(name, yaml.ScalarNode) or name.tag != "tag:yaml.org,2002:str":
            raise SetupError(f"{top.source}:{line}: the key `{path}` must be a plain text")
        if key in seen:
            raise SetupError(
                f"{top.source}:{line}: `{path}` is given twice, first in line {seen[key]}; keep one"
            )
        seen[key] = line
        yield (*keys, key), SourceLocation(top.source, top.folder, line)
        yield from _locations(value, (*keys, key), top)


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f":{mark.line + 1}"
    return ""
