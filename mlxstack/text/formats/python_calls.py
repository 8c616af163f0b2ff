"""Pythonic tool calls, also with unescaped strings."""

import ast
import re
from typing import Any

from mlxstack.core.conversation import ToolCall
from mlxstack.text.formats.argument_values import decoded, python_value
from mlxstack.text.formats.checked_calls import checked_call

_HEAD = re.compile(r"[\s,]*([\w.]+)\(\s*")
_KEY = re.compile(r"[\s,]*(\w+)\s*=\s*")
# An argument ends where another one or the end of its call follows.
_REST = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,|\]|$)))"
_TEXT = re.compile(rf"\"(.*?)\"{_REST}|'(.*?)'{_REST}", re.DOTALL)
_VALUE = re.compile(rf".*?{_REST}", re.DOTALL)


def parse_python_calls(text: str) -> tuple[ToolCall, ...]:
    """Python calls, in a list or not; raises ValueError or SyntaxError."""
    text = text.strip()
    try:
        lines = ast.parse(text).body
    except SyntaxError:
        return _unescaped(text if text.startswith("[") else f"[{text}]")
    nodes = [line.value for line in lines if isinstance(line, ast.Expr)]
    if len(nodes) == 1 and isinstance(nodes[0], ast.List | ast.Tuple):
        nodes = nodes[0].elts
    if not lines or (len(nodes) < len(lines) and not isinstance(lines[0], ast.Expr)):
        raise ValueError(f"no calls: {text!r}")
    try:
        return tuple(_call(node) for node in nodes)
    except ValueError:
        return _unescaped(text if text.startswith("[") else f"[{text}]")


def _call(node: Any) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(f"no call with keywords: {ast.unparse(node)!r}")
    arguments = {str(one.arg): python_value(one.value) for one in node.keywords}
    return _checked(ast.unparse(node.func), arguments)


def _unescaped(text: str) -> tuple[ToolCall, ...]:
    """Calls whose strings are written as they are."""
    calls, at = [], 1
    while head := _HEAD.match(text, at):
        at = head.end()
        arguments: dict[str, Any] = {}
        while key := _KEY.match(text, at):
            if value := _TEXT.match(text, key.end()):
                arguments[key[1]] = value[1] if value[1] is not None else value[2]
            elif value := _VALUE.match(text, key.end()):
                arguments[key[1]] = decoded(value[0].strip(), value[0])
            else:
                raise ValueError(f"no argument: {text[at:]!r}")
            at = value.end()
        at = text.index(")", at) + 1
        calls.append(_checked(head[1], arguments))
    if not text.startswith("[") or text[at:].strip() != "]":
        raise ValueError(f"no list of calls: {text!r}")
    return tuple(calls)


def _checked(name: str, arguments: dict[str, Any]) -> ToolCall:
    call = checked_call(name, None, arguments)
    if call is None:
        raise ValueError(f"no call: {name!r}")
    return call
