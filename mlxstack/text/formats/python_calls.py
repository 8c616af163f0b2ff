"""Pythonic tool calls, also with unescaped strings."""

import ast
import re
from typing import Any

from mlxstack.core.conversation import ToolCall
from mlxstack.text.formats.argument_values import (
    ArgumentTypes,
    CalledArguments,
    argument_value,
    decoded,
    python_value,
    type_names,
)
from mlxstack.text.formats.checked_calls import checked_call
from mlxstack.text.formats.description import PythonBody
from mlxstack.text.formats.nested_tags import CONTAINERS
from mlxstack.text.schema_types import SchemaTypes

_HEAD = re.compile(r"[\s,]*([\w.]+)\(\s*")
_END = re.compile(r"[\s,]*\)")
_KEY = re.compile(r"[\s,]*([\w$-]+)(?:\s+=\s*|=)")
_SPACE = re.compile(r"\s*")
# An argument ends where another one or the end of its call follows.
_REST = r"(?:,\s*+[\w$-]++\s*+=|(?:,\s*+)?\)\s*+(?:,|\]|$))"
_FOLLOWING = re.compile(_REST)
_CLOSING = {quote: re.compile(rf"{quote}(?=\s*+{_REST})") for quote in "\"'"}


class _ForwardSearch:
    """First matches of a pattern at growing positions, in one pass."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._pattern = pattern
        self._text = text
        self._from = 0
        self._match: re.Match[str] | None = None

    def at(self, position: int) -> int:
        """Start of the first match from here; -1 without one."""
        is_behind = self._match is not None and self._match.start() < position
        if is_behind or position < self._from or not self._from:
            self._match = self._pattern.search(self._text, position)
            self._from = max(1, position)
        return -1 if self._match is None else self._match.start()


class PythonCalls:
    """Reads whole Python calls, with the argument types of the tools."""

    def __init__(self, body: PythonBody, types: ArgumentTypes) -> None:
        self._body = body
        self._types = types

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """Python calls, in a list or not; raises ValueError or SyntaxError."""
        text = text.strip()
        listed = text if text.startswith("[") else f"[{text}]"
        try:
            lines = ast.parse(text).body
        except SyntaxError:
            return self._unescaped(listed)
        nodes = [line.value for line in lines if isinstance(line, ast.Expr)]
        if len(nodes) == 1 and isinstance(nodes[0], ast.List | ast.Tuple):
            nodes = nodes[0].elts
        if not lines or (len(nodes) < len(lines) and not isinstance(lines[0], ast.Expr)):
            raise ValueError(f"no calls: {text!r}")
        try:
            return tuple(self._call(node) for node in nodes)
        except ValueError:
            return self._unescaped(listed)

    def _of(self, name: str, key: str) -> SchemaTypes:
        return self._types.of(self._types.name(name), key)

    def is_bare(self, name: str, key: str) -> bool:
        """Whether a value without quotes is text."""
        return self._body.has_bare_text and self._of(name, key).is_text

    def is_spelled(self, name: str, key: str) -> bool:
        """Whether quotes hold a value of another type."""
        types = self._of(name, key)
        if not types.texts:
            return True
        return self._body.has_quoted_values and bool(types.others)

    def _call(self, node: Any) -> ToolCall:
        if not isinstance(node, ast.Call):
            raise ValueError(f"no call: {ast.unparse(node)!r}")
        name = ast.unparse(node.func)
        keys = self._types.names(self._types.name(name))[: len(node.args)]
        given = [*zip(keys, node.args, strict=True)]
        given += [(str(one.arg), one.value) for one in node.keywords]
        return checked_call(name, None, {key: self._value(name, key, one) for key, one in given})

    def _value(self, name: str, key: str, node: ast.expr) -> Any:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not is_text and self.is_bare(name, key):
            raise ValueError(f"text without quotes: {key}")
        value = python_value(node)
        if is_text and self.is_spelled(name, key):
            return argument_value(value, self._of(name, key))
        return value

    def _unescaped(self, text: str) -> tuple[ToolCall, ...]:
        """Calls whose strings are written as they are."""
        calls = []
        at = 1
        ends = _ValueEnds(text)
        while head := _HEAD.match(text, at):
            at = head.end()
            arguments: dict[str, Any] = {}
            while key := _KEY.match(text, at):
                arguments[key[1]], at = self._unescaped_value(head[1], key[1], ends, key.end())
            end = _END.match(text, at)
            if end is None:
                raise ValueError(f"no end of a call: {text[at:]!r}")
            at = end.end()
            calls.append(checked_call(head[1], None, arguments))
        if not text.startswith("[") or text[at:].strip() != "]":
            raise ValueError(f"no list of calls: {text!r}")
        return tuple(calls)

    def _unescaped_value(self, name: str, key: str, ends: "_ValueEnds", at: int) -> tuple[Any, int]:
        """Value after an equals sign, and its end."""
        text = ends.text
        start = at + len(_SPACE.match(text, at)[0])  # type: ignore[index]
        closing = ends.quoted(start)
        if closing >= 0:
            quoted = text[start + 1 : closing]
            is_other = self.is_spelled(name, key)
            read = argument_value(quoted, self._of(name, key)) if is_other else quoted
            return read, closing + 1
        following = ends.following(at)
        if following < 0:
            raise ValueError(f"no argument: {text[at:]!r}")
        if self.is_bare(name, key):
            return argument_value(text[at:following], self._of(name, key)), following
        value = text[start:following].rstrip()
        types = self._of(name, key)
        bare = decoded(value.strip(), value)
        is_other = isinstance(bare, str) and not types.texts
        return argument_value(value, types) if is_other else bare, start + len(value)


class _ValueEnds:
    """Ends of the values of Python calls, from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._following = _ForwardSearch(_FOLLOWING, text)
        self._closing = {
            quote: _ForwardSearch(pattern, text) for quote, pattern in _CLOSING.items()
        }

    def quoted(self, start: int) -> int:
        """Quote that closes the text that begins here; -1 without one."""
        closing = self._closing.get(self.text[start : start + 1])
        return -1 if closing is None else closing.at(start + 1)

    def following(self, start: int) -> int:
        """Comma or bracket after the value that begins here; -1 without one."""
        return self._following.at(start)


class PythonArguments(CalledArguments):
    """The arguments of a Python call, to be copied as they come."""

    def __init__(self, calls: PythonCalls, types: ArgumentTypes, name: str) -> None:
        super().__init__(types, name)
        self._calls = calls

    def is_copied(self, key: str, sign: str) -> bool:
        """Whether a value that begins so means what it says.

        A set is written in the braces of an object.
        """
        if sign == "{" and type_names(self.types_of(key)) & CONTAINERS == {"array"}:
            return False
        is_other = self._calls.is_spelled if sign in "\"'" else self._calls.is_bare
        return not is_other(self._name, key)
