"""Reads objects and lists written as nested tags."""

from typing import Any

from msgspec import Struct

from mlxstack.text.formats.argument_values import ANY, argument_value, type_names
from mlxstack.text.formats.notations import CONTAINERS
from mlxstack.text.formats.syntax import KEY, TaggedBody
from mlxstack.text.formats.text_feed import MarkSet, Reading, TextFeed
from mlxstack.text.schema_types import Schema, SchemaTypes, schema_types

MAX_DEPTH = 32


class TypedPlace(Struct, frozen=True):
    """Types of a value in parameters `root`, inside `depth` others."""

    types: SchemaTypes
    root: Schema
    depth: int = 0

    @property
    def containers(self) -> frozenset[str]:
        """Containers that may stand here; none beside text."""
        is_text = bool(self.types.texts) and self.types != ANY
        if is_text:
            return frozenset()
        return CONTAINERS & type_names(self.types)

    def member(self, key: str) -> "TypedPlace":
        """The place of a member of the object."""
        return self._inner([_member(one, key) for one in self.types.others])

    def item(self) -> "TypedPlace":
        """The place of an item of the list."""
        return self._inner([one.get("items") for one in self.types.others])

    def _inner(self, schemas: list[Any]) -> "TypedPlace":
        known = [schema_types(one, self.root) for one in schemas if isinstance(one, dict)]
        texts = tuple(text for one in known for text in one.texts)
        others = tuple(other for one in known for other in one.others)
        types = SchemaTypes(texts, others) if known else ANY
        return TypedPlace(types, self.root, self.depth + 1)


class NestedTags:
    """Reads values of a tagged body with an `item` tag."""

    def __init__(self, feed: TextFeed, body: TaggedBody) -> None:
        self._feed = feed
        self._body = body
        self._key_end = MarkSet([body.value_opens.strip()])

    def begins(self, at: int, place: TypedPlace) -> Reading[bool]:
        """Whether a container stands here that the schema allows."""
        if not place.containers or place.depth > MAX_DEPTH:
            return False
        feed = self._feed
        opens = self._body.argument_opens.strip()
        at = yield from feed.space(at)
        return (yield from feed.starts(opens, at)) and not (yield from feed.starts(f"{opens}/", at))

    def container(self, key: str, at: int, place: TypedPlace) -> Reading[tuple[Any, int]]:
        """Object or list in a tag, and its end. Raises ValueError."""
        feed = self._feed
        body = self._body
        closes = body.value_closes.replace(KEY, key)
        members: list[tuple[str, Any]] = []
        while True:
            end = yield from feed.literal(closes, at)
            if end is not None:
                return _joined(members, body.item, place), end
            start = yield from feed.literal(body.argument_opens, at)
            mark = None if start is None else (yield from feed.find(self._key_end, start))
            if start is None or not mark or not mark.text:
                raise ValueError(f"nothing closes {key}")
            name = feed.text[start : mark.start].strip()
            is_item = name == body.item and "array" in place.containers
            inner = place.item() if is_item else place.member(name)
            value, at = yield from self._value(name, mark.end, inner)
            members.append((name, None if is_item and value == "" else value))

    def _value(self, key: str, at: int, place: TypedPlace) -> Reading[tuple[Any, int]]:
        if (yield from self.begins(at, place)):
            return (yield from self.container(key, at, place))
        closes = self._body.value_closes.strip().replace(KEY, key)
        mark = yield from self._feed.find(MarkSet([closes]), at)
        if not mark.text:
            raise ValueError(f"nothing closes {key}")
        return tag_value(self._feed.text[at : mark.start], place.types), mark.end


def tag_value(text: str, types: SchemaTypes) -> Any:
    """Value of a tag without tags, maybe an empty container."""
    if not text.strip() and not types.texts:
        names = type_names(types)
        if "object" in names:
            return {}
        if "array" in names:
            return []
        return None
    return argument_value(text, types)


def _member(schema: Schema, key: str) -> Any:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return known.get(key, schema.get("additionalProperties"))


def _joined(members: list[tuple[str, Any]], item: str, place: TypedPlace) -> Any:
    """A list of all items, or else an object."""
    is_list = bool(members) and all(name == item for name, _ in members)
    if is_list and "array" in place.containers:
        return [value for _, value in members]
    found: dict[str, list[Any]] = {}
    for name, value in members:
        found.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}
