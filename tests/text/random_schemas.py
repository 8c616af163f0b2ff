"""Random schemas with the keywords of JSON Schema 2020-12, sound ones and faulty ones."""

from random import Random
from typing import Any

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
NAMES = ("a", "b", "path", "limit", "größe", 'q"uote')
FAULTS: tuple[dict[str, Any], ...] = (
    {"type": "any"},
    {"type": []},
    {"type": 7},
    {"pattern": "["},
    {"pattern": None},
    {"minLength": -1},
    {"maxLength": "3"},
    {"minimum": "0"},
    {"multipleOf": 0},
    {"multipleOf": -3},
    {"multipleOf": 1e300},
    {"enum": None},
    {"enum": []},
    {"required": True},
    {"properties": []},
    {"properties": {"a": None}},
    {"additionalProperties": None},
    {"items": None},
    {"items": 5},
    {"prefixItems": {}},
    {"minItems": 1.5},
    {"anyOf": []},
    {"anyOf": {}},
    {"allOf": [None]},
    {"oneOf": [{"type": "any"}, {"type": "string"}]},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.org/schema.json"},
    {"$ref": 3},
    {"$dynamicRef": "#node"},
    {"patternProperties": {"[": {}}},
)


class SchemaMaker:
    """Makes random schemas; `fault_rate` is the share of parts with a faulty keyword."""

    def __init__(self, random: Random, fault_rate: float = 0.0) -> None:
        self._random = random
        self._fault_rate = fault_rate

    def root(self) -> dict[str, Any]:
        """An object with definitions, as tools and formats have it."""
        definitions = {"Leaf": self.part(1), "Tree": self._tree()}
        whole = {"type": "object", **self._object(3), "$defs": definitions}
        if self._random.random() < 0.2:
            whole["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return whole

    def part(self, depth: int) -> Any:
        """A schema somewhere in another."""
        random = self._random
        chance = random.random()
        if chance < 0.03:
            return random.choice((True, {}))
        if chance < 0.12:
            return {"$ref": random.choice(("#/$defs/Leaf", "#/$defs/Tree", "#"))}
        if chance < 0.22 and depth:
            keyword = random.choice(("anyOf", "oneOf", "allOf"))
            return {keyword: [self.part(depth - 1) for _ in range(random.randint(1, 3))]}
        if chance < 0.3:
            return random.choice(({"const": "x"}, {"enum": ["x", 1, None, True, [1], {"a": 1}]}))
        schema = self._typed(random.choice(TYPES), depth)
        if random.random() < 0.3:
            schema |= self._annotation()
        if random.random() < 0.15:
            schema |= self._rare(depth)
        if random.random() < self._fault_rate:
            schema |= random.choice(FAULTS)
        return schema

    def _tree(self) -> dict[str, Any]:
        children = {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2}
        return {"type": "object", "properties": {"value": {"type": "integer"}, "kids": children}}

    def _typed(self, kind: str, depth: int) -> dict[str, Any]:
        random = self._random
        keywords: dict[str, Any] = {}
        if kind == "string":
            keywords = random.choice(
                ({}, {"maxLength": 5}, {"minLength": 1, "maxLength": 3}, {"pattern": "^[ab]{1,3}$"},
                 {"pattern": "(?=a)b"}, {"format": random.choice(("date", "uuid", "uri", "odd"))},
                 {"maxLength": 500_000})
            )  # fmt: skip
        elif kind in ("number", "integer"):
            keywords = random.choice(
                ({}, {"minimum": 0}, {"maximum": 9, "exclusiveMinimum": -3}, {"multipleOf": 2})
            )
        elif kind == "object":
            keywords = self._object(depth) if depth else {}
        elif kind == "array":
            keywords = self._array(depth) if depth else {"maxItems": 2}
        named = [kind, "null"] if random.random() < 0.1 and kind != "null" else kind
        return {"type": named, **keywords}

    def _object(self, depth: int) -> dict[str, Any]:
        random = self._random
        names = random.sample(NAMES, random.randint(0, 4))
        made: dict[str, Any] = {"properties": {name: self.part(depth - 1) for name in names}}
        if random.random() < 0.6:
            made["required"] = random.sample(names, random.randint(0, len(names)))
        if random.random() < 0.5:
            made["additionalProperties"] = random.choice((False, False, True, self.part(0)))
        if random.random() < 0.1:
            made["patternProperties"] = {"^x-": self.part(0)}
        if random.random() < 0.1:
            made["maxProperties"] = random.randint(len(names), 5)
        return made

    def _array(self, depth: int) -> dict[str, Any]:
        random = self._random
        made: dict[str, Any] = {"items": self.part(depth - 1), "maxItems": random.randint(1, 3)}
        if random.random() < 0.3:
            made["minItems"] = 1
        if random.random() < 0.2:
            made["prefixItems"] = [self.part(0)]
        return made

    def _annotation(self) -> dict[str, Any]:
        return self._random.choice(
            ({"description": "words"}, {"title": "T"}, {"default": None}, {"examples": [1]},
             {"deprecated": True}, {"readOnly": True}, {"$comment": "c"}, {"x-order": 3})
        )  # fmt: skip

    def _rare(self, depth: int) -> dict[str, Any]:
        """Keywords that no grammar enforces."""
        inner = self.part(depth - 1) if depth else {}
        return self._random.choice(
            ({"propertyNames": {"type": "string"}}, {"uniqueItems": True}, {"not": inner},
             {"contains": inner, "minContains": 1}, {"dependentRequired": {"a": ["b"]}},
             {"unevaluatedProperties": False}, {"unevaluatedItems": inner},
             {"if": inner, "then": inner, "else": {}}, {"dependentSchemas": {"a": inner}},
             {"contentEncoding": "base64"}, {"contentSchema": inner})
        )  # fmt: skip
