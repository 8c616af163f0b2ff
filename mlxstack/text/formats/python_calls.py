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
from mlxstack.text.schema_types import SchemaTypes, properties

_HEAD = re.compile(r"[\s,]*([\w.]+)\(\s*")
_END = re.compile(r"[\s,]*\)")
_KEY = re.compile(r"[\s,]*([\w$-]+)(?:\s+=\s*|=)")
_SPACE = re.compile(r"\s*")
# An argument ends where another one or the end of its call follows.
_REST = r"(?:,\s*[\w$-]+\s*=|(?:,\s*)?\)\s*(?:,|\]|$))"
_TEXT = re.compile(rf"\"(.*?)\"(?=\s*{_REST})|'(.*?)'(?=\s*{_REST})", re.DOTALL)
_VALUE = re.compile(rf".*?(?=\s*{_REST})", re.DOTALL)
_BARE = re.compile(rf".*?(?={_REST})", re.DOTALL)


class PythonCalls:
    """Reads whole Python calls, with the argument types of the tools."""

    def __init__(self, body: PythonBody, types: ArgumentTypes) -> None:
        self._body, self._types = body, types

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
        keys = [*properties(self._types.root(self._types.name(name)))][: len(node.args)]
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
        calls, at = [], 1
        while head := _HEAD.match(text, at):
            at = head.end()
            arguments: dict[str, Any] = {}
            while key := _KEY.match(text, at):
                arguments[key[1]], at = self._unescaped_value(head[1], key[1], text, key.end())
            end = _END.match(text, at)
            if end is None:
                raise ValueError(f"no end of a call: {text[at:]!r}")
            at = end.end()
            calls.append(checked_call(head[1], None, arguments))
        if not text.startswith("[") or text[at:].strip() != "]":
            raise ValueError(f"no list of calls: {text!r}")
        return tuple(calls)

    def _unescaped_value(self, name: str, key: str, text: str, at: int) -> tuple[Any, int]:
        """Value after an equals sign, and its end."""
        start = at + len(_SPACE.match(text, at)[0])  # type: ignore[index]
        if value := _TEXT.match(text, start):
            quoted = value[1] if value[1] is not None else value[2]
            is_other = self.is_spelled(name, key)
            read = argument_value(quoted, self._of(name, key)) if is_other else quoted
            return read, value.end()
        if self.is_bare(name, key) and (value := _BARE.match(text, at)):
            return argument_value(value[0], self._of(name, key)), value.end()
        if value := _VALUE.match(text, start):
            types, bare = self._of(name, key), decoded(value[0].strip(), value[0])
            is_other = isinstance(bare, str) and not types.texts
            return argument_value(value[0], types) if is_other else bare, value.end()
        raise ValueError(f"no argument: {text[at:]!r}")


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
