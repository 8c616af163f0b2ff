"""Regular expression of the texts of a Lark grammar without recursion.

The input of a custom tool stands in a JSON string in most formats of calls, where llguidance
enforces regular expressions and no grammars. The notation is read by lark's own grammar of it
(lark/grammars/lark.lark).
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import lark
from lark import Lark, Tree
from lark.visitors import Interpreter

from mlxstack.text.grammar.lark_builder import escaped

MAX_CHARS = 20_000
"""Characters of a grammar, and of its expression."""
LIBRARY = Path(lark.__file__).parent / "grammars"
FLAGS = "ismx"
ESCAPES = "\\'\"abfnrtvxuUN01234567"
"""Characters after the backslash of an escape."""
LINEAR = {
    "REGEXP": r"REGEXP: /\/(?!\/)(\\.|[^\/\\])*\/[imslux]*/",
    "%import common.ESCAPED_STRING -> _STRING": r'_STRING: /"(\\.|[^"\\\n])*"/',
}
"""Lines in place of those of lark's grammar whose expressions can take exponential time."""
WITHOUT_LOOKAROUND = {"ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"'}
"""Terminals of Lark's library whose definition has lookaround."""

Node = Any
"""Tree of lark, whose types say of each child that it may be a token."""


class NoPattern(ValueError):
    """Grammar without a regular expression here; the message says why."""


def lark_pattern(definition: str) -> str:
    """Regular expression that matches the whole texts of rule `start`. Raises NoPattern."""
    if len(definition) > MAX_CHARS:
        raise NoPattern(f"it has more than {MAX_CHARS} characters")
    try:
        return _Grammar(_reader().parse(definition + "\n")).rule("start")
    except lark.exceptions.LarkError as error:
        raise NoPattern(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise NoPattern("it is too deep") from None


@cache
def _reader() -> Lark:
    lines = (LIBRARY / "lark.lark").read_text(encoding="utf-8").splitlines()
    text = "\n".join(LINEAR.get(line.partition(":")[0], line) for line in lines)
    return Lark(text, parser="lalr")


@cache
def _library() -> dict[str, Node]:
    tree: Node = _reader().parse((LIBRARY / "common.lark").read_text(encoding="utf-8"))
    return {str(node.children[0]): node for node in tree.children if node.data == "token"}


class _Grammar(Interpreter[Any, str]):
    """Definitions of a grammar.

    A visit of a part returns its expression, with names replaced by what they mean. Text that the
    grammar ignores may follow each terminal of a rule.
    """

    def __init__(self, tree: Node) -> None:
        self._definitions: dict[str, Node] = {}
        self._open: list[str] = []
        self._expressions: dict[tuple[str, bool], str] = {}
        self._is_in_terminal = False
        self._ignored = ""
        ignored = []
        for node in tree.children:
            match node.data:
                case "rule" | "token":
                    self._definitions[str(node.children[0]).lstrip("!?")] = node
                case "import" | "multi_import":
                    self._import(node)
                case "ignore":
                    ignored.append(node.children[0])
                case kind:
                    raise NoPattern(f"%{kind} is not supported")
        if ignored:
            self._ignored = f"(?:{'|'.join(map(self._terminal, ignored))})*"

    def rule(self, name: str) -> str:
        """Expression of a rule, with ignored text before it."""
        return self._ignored + self._named(name)

    def alias(self, node: Node) -> str:
        return self.visit(node.children[0])

    def expansions(self, node: Node) -> str:
        return f"(?:{_joined('|', map(self.visit, node.children))})"

    def expansion(self, node: Node) -> str:
        return _joined("", map(self.visit, node.children))

    def maybe(self, node: Node) -> str:
        return f"(?:{self.visit(node.children[0])})?"

    def expr(self, node: Node) -> str:
        atom, *operator = (child for child in node.children if child is not None)
        return _repeated(self.visit(atom), list(map(str, operator)))

    def name(self, node: Node) -> str:
        return self._named(str(node.children[0]))

    def literal(self, node: Node) -> str:
        return _literal(str(node.children[0])) + self._gap

    def literal_range(self, node: Node) -> str:
        first, last = (re.escape(_unquoted(str(text))) for text in node.children)
        return f"[{first}-{last}]{self._gap}"

    def __default__(self, tree: Tree[Any]) -> str:
        raise NoPattern(f"{tree.data} is not supported")

    @property
    def _gap(self) -> str:
        if self._is_in_terminal:
            return ""
        return self._ignored

    def _named(self, name: str) -> str:
        """Expression of a rule or a terminal."""
        place = (name, self._is_in_terminal)
        if place not in self._expressions:
            self._expressions[place] = self._defined(name)
        return self._expressions[place]

    def _defined(self, name: str) -> str:
        if name in self._open:
            raise NoPattern(f"{name} refers to itself")
        node = self._definitions.get(name) or _library().get(name)
        if node is None:
            raise NoPattern(f"{name} is not defined")
        if any(parameter is not None for parameter in node.children[1].children):
            raise NoPattern(f"{name} has parameters")
        self._open.append(name)
        if node.data == "token":
            replaced = WITHOUT_LOOKAROUND.get(str(node.children[0]))
            expression = (replaced or self._terminal(node.children[-1])) + self._gap
        else:
            expression = self.visit(node.children[-1])
        self._open.pop()
        return expression

    def _terminal(self, node: Node) -> str:
        """Expression of what stands in a terminal, without ignored text in it."""
        was_in_terminal = self._is_in_terminal
        self._is_in_terminal = True
        expression = self.visit(node)
        self._is_in_terminal = was_in_terminal
        return expression

    def _import(self, node: Node) -> None:
        path, names = node.children
        library, *terminal = [str(part.children[0]) for part in path.find_data("name")]
        if library != "common":
            raise NoPattern(f"%import of {library} is not supported")
        if node.data == "multi_import":
            named = {str(name.children[0]): str(name.children[0]) for name in names.children}
        else:
            named = {terminal[0] if names is None else str(names.children[0]): terminal[0]}
        for name, original in named.items():
            if original not in _library():
                raise NoPattern(f"common.{original} does not exist")
            self._definitions[name] = _library()[original]


def _repeated(expression: str, operator: list[str]) -> str:
    """Expression with `?`, `*`, `+` or the numbers of `~2..3` after it."""
    match operator:
        case []:
            return expression
        case ["?" | "*" | "+" as sign]:
            return f"(?:{expression}){sign}"
        case numbers:
            return f"(?:{expression}){{{','.join(numbers)}}}"


def _literal(text: str) -> str:
    """Expression of a string or a regular expression in Lark's notation."""
    if text.startswith('"'):
        plain = escaped(_unquoted(text.removesuffix("i")))
        if text.endswith("i"):
            return f"(?i:{plain})"
        return f"(?:{plain})"
    expression, _, flags = text.removeprefix("/").rpartition("/")
    python_flags = "".join(flag for flag in flags if flag in FLAGS)
    return f"(?{python_flags}:{expression})"


def _joined(separator: str, expressions: Iterable[str]) -> str:
    """Expressions in a row. Raises NoPattern before they fill the memory."""
    parts = list(expressions)
    if sum(map(len, parts)) > MAX_CHARS:
        raise NoPattern(f"its expression has more than {MAX_CHARS} characters")
    return separator.join(parts)


def _unquoted(text: str) -> str:
    """Text of a string in Python's notation; other escapes mean themselves."""

    def read(escape: re.Match[str]) -> str:
        if escape[1] in ESCAPES:
            return escape[0]
        return "\\" + escape[0]

    python_text = re.sub(r"\\(.)", read, text)
    try:
        return str(ast.literal_eval(python_text))
    except (SyntaxError, ValueError) as error:
        raise NoPattern(f"{text} is no string: {error}") from None
