"""Builds Lark rules: marks, JSON, and verbatim text between marks."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.enforced_schema import LOOKAROUND, with_definitions, without_grammar
from mlxstack.text.grammar.grammar_check import check_multiples
from mlxstack.text.grammar.schema_grammar import enforced_json
from mlxstack.text.schema_types import Schema, named_types

MAX_COUNTED = 63
"""Members of an object whose number is bounded, by bits of llguidance's parameter of a rule."""
ANYTHING = "(?s:.*)"
MAX_RULES = 5000
MAX_MIN_LENGTH = 100
MAX_MAX_LENGTH = 1000
"""Lengths that are enforced before a special token, in characters.

llguidance compiles larger ones for seconds, and 500,000 for minutes; before a mark in letters it
takes milliseconds.
"""
SCALARS = frozenset({"number", "integer", "boolean", "null"})
OPEN = {"{index}": "/[0-9]{1,3}/", "{count}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9_-]{1,40}/"}


class MemberRule(Struct, frozen=True):
    """Rule of an object's member or of a call's argument."""

    rule: str
    is_required: bool


class LarkBuilder:
    """Collects Lark rules; `special` are textless tokens by name.

    `unenforced` are the keywords of schemas that the rules leave out.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.unenforced: set[str] = set()
        self._special = special
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._defined: set[str] = set()
        self._sets: dict[tuple[Any, ...], str] = {}
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._cuts = re.compile(f"({names})" if names else "(?!)")

    def grammar(self, start: str) -> str:
        """The whole of it."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str) -> str:
        """Name of the rule with this body."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self.complete(self._names[body], body)
        return self._names[body]

    def reserve(self) -> str:
        """Name of a rule without a body yet. Raises BadRequest."""
        if len(self._defined) >= MAX_RULES:
            raise BadRequest(f"tools: their schemas make more than {MAX_RULES} rules", "tools")
        name = f"r{len(self._defined)}"
        self._defined.add(name)
        return name

    def terminal(self, body: str) -> str:
        """Name of a terminal with this body."""
        name = self.reserve().upper()
        self.complete(name, body)
        return name

    def define(self, name: str) -> bool:
        """Reserve the name of a recursive rule; False if taken."""
        is_new = name not in self._defined
        self._defined.add(name)
        return is_new

    def complete(self, name: str, body: str) -> None:
        """The rule of a name taken by `define` or `reserve`."""
        self._rules.append(f"{name}: {body}")

    def literal(self, text: str) -> str:
        """Rule for this text; names of special tokens mean those tokens."""
        return " ".join(self._part(part) for part in self._cuts.split(text) if part) or '""'

    def call_opening(self, template: str, name: str) -> str:
        """Rule of an opening with its `{name}`; number and id vary."""
        parts = re.split(r"(\{index\}|\{count\}|\{id\})", template)
        named = (OPEN.get(part) or self.literal(part.replace("{name}", name)) for part in parts)
        return " ".join(named)

    def json(self, schema: Schema, root: Schema) -> str:
        """JSON of this schema, its objects in the order of their properties.

        It may refer to parts of `root`. Raises BadRequest for what is no schema.
        """
        try:
            whole = with_definitions(schema, root)
            self.unenforced |= without_grammar(whole)
        except RecursionError as error:
            raise BadRequest(f"tools: the schema is too deep: {error}", "tools") from None
        text = enforced_json(whole, "tools")
        check_multiples(whole, "tools")
        return f"%json {text}"

    def unordered(
        self,
        members: Sequence[MemberRule],
        between: str,
        *,
        others: str = "",
        n_min: int = 0,
        n_max: int | None = None,
    ) -> str:
        """Rule of members in any order with `between`, each once at most.

        `others` may stand among them any number of times. `n_min` and `n_max` bound the number of
        members where there are no others. Beyond 63 members, optional ones may repeat.
        """
        # The bits of the required members are the lowest.
        ordered = sorted(members, key=lambda member: not member.is_required)
        counted = ordered[:MAX_COUNTED]
        n = len(counted)
        n_required = sum(member.is_required for member in members)
        if n_required > n:
            return self.rule(listed(members, between))
        repeatable = [member.rule for member in ordered[MAX_COUNTED:]]
        repeatable += [others] if others else []
        if n_max == 0 or not (counted or repeatable):
            return '""'
        key = (*ordered, between, others, n_min, n_max)
        if key in self._sets:
            return self._sets[key]
        following = self.reserve()
        ending = self.reserve()
        forms = [
            f"{member.rule} {ending}::set_bit({bit}) %if bit_clear({bit})"
            for bit, member in enumerate(counted)
        ]
        forms += [f"{rule} {ending}::_" for rule in repeatable]
        self.complete(f"{following}::_", " | ".join(forms))
        n_most = n if n_max is None else min(n, n_max)
        more = "" if repeatable else f" %if bit_count_lt([0:{n}], {n_most})"
        is_complete = "true"
        if n_required:
            is_complete = f"is_ones([0:{n_required}])"
        if n_min > n_required:
            is_complete = f"and({is_complete}, bit_count_ge([0:{n}], {n_min}))"
        self.complete(f"{ending}::_", f'"" %if {is_complete} | {between} {following}::_{more}')
        is_optional = not n_required and not n_min
        self._sets[key] = self.rule(f"{following}::0" + (' | ""' if is_optional else ""))
        return self._sets[key]

    def scalar(self, schema: Schema, root: Schema) -> str:
        """Rule of the numbers and constants of a schema, or ""."""
        types = [name for name in named_types(schema) if name in SCALARS]
        if "enum" in schema:
            scalars = [value for value in schema["enum"] if not isinstance(value, dict | list)]
            if scalars:
                return self.json({"enum": scalars}, root)
            return ""
        if types:
            return self.json({**schema, "type": types}, root)
        return ""

    def either(self, forms: Iterable[str]) -> str:
        """Name of a rule of all forms that exist, or ""."""
        existing = [form for form in forms if form]
        if existing:
            return self.rule(" | ".join(existing))
        return ""

    def text(
        self, schema: Schema, avoided: Sequence[str], closes: str, literals: Sequence[str] = ()
    ) -> str:
        """Plain text of this schema up to `closes`; "" without one.

        No text matches one of `avoided`. One of `literals` may stand in its place.
        """
        if "enum" in schema:
            fit = [text for text in schema["enum"] if not _is_avoided(text, avoided)]
            if not fit:
                return ""
            return f"{self.rule(' | '.join(map(quoted, fit)))} {self.literal(closes)}"
        # Letters of the mark belong to the lexeme, which else would be as long as it can.
        head = self._cuts.split(closes)[0]
        patterns = list(self._wanted(schema if head == closes else self._countable(schema)))
        ending = escaped(head)
        lexemes = [f"/{_slashed(f'(?:{pattern}){ending}')}/" for pattern in patterns or [ANYTHING]]
        unwanted = [f"~/{_slashed(f'(?:{pattern}){ending}')}/" for pattern in avoided]
        name = f"t{len(self._rules)}"
        lazy = ""
        if head == closes:
            lazy = "[lazy]"
        self._rules.append(f"{name}{lazy}: {name.upper()}")
        # A lexeme of their own would be taken for the beginning of a text.
        constants = "".join(f" | /{_slashed(word + ending)}/" for word in literals)
        self._rules.append(f"{name.upper()}: ({' & '.join([*lexemes, *unwanted])}){constants}")
        return f"{name} {self.literal(closes.removeprefix(head))}"

    def free_text(self, avoided: str) -> str:
        """Text, perhaps none, without the first letters of `avoided`."""
        head = self._cuts.split(avoided)[0]
        name = f"T{len(self._rules)}"
        exclusion = ""
        if head:
            exclusion = f" & ~/{_slashed(containing(head))}/"
        self._rules.append(f"{name}: /(?s:.+)/{exclusion}")
        return f"{name}?"

    def _countable(self, schema: Schema) -> Schema:
        """Schema with the lengths that are enforced before a special token."""
        countable = dict(schema)
        if isinstance(schema.get("minLength"), int) and schema["minLength"] > MAX_MIN_LENGTH:
            countable["minLength"] = MAX_MIN_LENGTH
            self.unenforced.add("minLength")
        if isinstance(schema.get("maxLength"), int) and schema["maxLength"] > MAX_MAX_LENGTH:
            del countable["maxLength"]
            self.unenforced.add("maxLength")
        return countable

    def _wanted(self, schema: Schema) -> Iterable[str]:
        """Regular expressions of which a text matches each."""
        least = schema.get("minLength")
        most = schema.get("maxLength")
        if isinstance(least, int) or isinstance(most, int):
            yield f"(?s:.){{{least or 0},{'' if most is None else most}}}"
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return
        if LOOKAROUND.search(pattern):
            self.unenforced.add("pattern")
        else:
            yield "|".join(_searched(way) for way in _ways(pattern))

    def _part(self, text: str) -> str:
        if text in self._special:
            return f"<[{self._special[text]}]>"
        return quoted(text)


def quoted(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def members(
    schemas: Mapping[str, tuple[Any, bool]], rule_of: Callable[[str, Any], str]
) -> list[MemberRule] | None:
    """Rules of properties; None if that of a required one is missing."""
    rules = []
    for key, (schema, is_required) in schemas.items():
        if rule := rule_of(key, schema):
            rules.append(MemberRule(rule, is_required))
        elif is_required:
            return None
    return rules


def listed(items: Sequence[MemberRule], between: str) -> str:
    """Items in order with `between`; optional ones may be missing."""
    forms = []
    for index, item in enumerate(items):
        following = (
            f"({between} {later.rule}){'' if later.is_required else '?'}"
            for later in items[index + 1 :]
        )
        forms.append(" ".join([item.rule, *following]))
        if item.is_required:
            break
    else:
        forms.append('""')
    return "(" + " | ".join(forms) + ")"


def containing(text: str) -> str:
    """The regular expression of everything that contains `text`."""
    return f"{ANYTHING}{escaped(text)}{ANYTHING}"


def escaped(text: str) -> str:
    """The regular expression of exactly this text."""
    return "\n".join(map(re.escape, text.split("\n")))


def whole_text(expression: str) -> str:
    """Regular expression for whole texts, without anchors."""
    return "|".join(_unanchored(way)[0] for way in _ways(expression))


def _searched(pattern: str) -> str:
    """Search expression of `pattern` as a match of the whole text."""
    inner, is_start, is_end = _unanchored(pattern)
    return f"{'' if is_start else ANYTHING}(?:{inner}){'' if is_end else ANYTHING}"


def _unanchored(pattern: str) -> tuple[str, bool, bool]:
    """Pattern without anchors, and whether it had `^` and `$`."""
    is_start = pattern.startswith("^")
    is_end = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    inner = pattern.removeprefix("^")
    return inner[:-1] if is_end else inner, is_start, is_end


def _ways(pattern: str) -> list[str]:
    """The alternatives of a regular expression that stand in no group."""
    ways = [""]
    depth = 0
    position = 0
    in_class = False
    while position < len(pattern):
        n = 1
        if pattern[position] == "\\":
            n = 2
        piece = pattern[position : position + n]
        in_class = (in_class or piece == "[") and piece != "]"
        depth += 0 if in_class else (piece == "(") - (piece == ")")
        if piece == "|" and not depth and not in_class:
            ways.append("")
        else:
            ways[-1] += piece
        position += n
    return ways


def _is_avoided(text: str, avoided: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, text) for pattern in avoided)


def _slashed(expression: str) -> str:
    """A regular expression escaped for use between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", "\\n")
