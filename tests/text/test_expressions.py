"""Regular expressions on texts of clients and models take linear time.

Each one of the package runs on texts that make a careless one quadratic, in a child process with
CPU seconds that linear work needs thousandths of.
"""

import ast
import importlib
import os
import pkgutil
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import Struct

import mlxstack

N_CHARS = 100_000
LIMIT_S = 2
"""CPU seconds for one text; a linear expression takes some milliseconds, others many seconds."""
ROOMS = ("text", "api", "service", "core", "policy", "store", "features", "gateway")
OTHERS_TEXTS = ("text.template", "text.tokens.byte", "derivation", "probe_renderings", "switches")
"""Modules whose expressions read short texts of a model's author alone, once at the load."""
MAX_PIECES = 10
FUNCTIONS = ("match", "fullmatch", "search", "sub", "split", "findall", "finditer")


class Expression(Struct, frozen=True):
    """Pattern with its flags, and the functions that it is called by."""

    place: str
    pattern: str | bytes
    flags: int
    functions: frozenset[str]


def modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        package = importlib.import_module(f"{mlxstack.__name__}.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(word in found.name for word in OTHERS_TEXTS):
                yield importlib.import_module(found.name)


def patterns_of(value: Any, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth < 3 and isinstance(value, tuple | list | set | frozenset | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from patterns_of(inner, depth + 1)
    elif depth < 3 and isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from patterns_of(getattr(value, name), depth + 1)


def sources() -> dict[str, str]:
    root = Path(mlxstack.__file__).parent
    return {str(file): file.read_text() for file in root.rglob("*.py")}


def functions_of(name: str, text: str) -> frozenset[str]:
    """Functions that a global pattern is called by; `search` where that is not seen."""
    called = set(re.findall(rf"\b{re.escape(name)}(?:\[\w+\])?\.({'|'.join(FUNCTIONS)})\(", text))
    if re.search(rf"\b(?:after|_skip)\({re.escape(name)}\b", text):
        called.add("match")
    return frozenset(called or {"search"})


def literal_calls(module: ModuleType) -> Iterator[Expression]:
    """Expressions that functions of `re` are called with."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="re"), attr=function),
                args=[ast.Constant(value=str() | bytes() as pattern), *_],
            ) if function in FUNCTIONS:
                place = f"{module.__name__}:{node.lineno}"
                yield Expression(place, pattern, 0, frozenset({function}))


def expressions() -> list[Expression]:
    texts = sources()
    known: dict[tuple[Any, int], Expression] = {}
    for module in modules():
        for name, value in list(vars(module).items()):
            for pattern in patterns_of(value):
                in_struct = not isinstance(value, re.Pattern) and not isinstance(value, dict)
                functions = frozenset({"match"}) if in_struct else frozenset[str]()
                if not in_struct:
                    text = texts[str(module.__file__)]
                    functions = functions_of(name, text)
                place = f"{module.__name__}.{name}"
                earlier = known.get((pattern.pattern, pattern.flags))
                if earlier is not None:
                    functions |= earlier.functions
                    place = earlier.place
                one = Expression(place, pattern.pattern, int(pattern.flags), functions)
                known[pattern.pattern, pattern.flags] = one
        for one in literal_calls(module):
            known.setdefault((one.pattern, one.flags), one)
    return sorted(known.values(), key=lambda one: one.place)


EXPRESSIONS = expressions()


def pieces(expression: Expression) -> list[str]:
    """Letters and words of a pattern, and what its classes stand for."""
    source = expression.pattern
    text = source if isinstance(source, str) else source.decode("latin-1")
    names = re.findall(r"(?<![\\\[(?<])[a-zA-Z][a-zA-Z_:-]+", text)
    plain = re.sub(r"\\[a-zA-Z]", "", text)
    signs = [sign for sign in plain if not sign.isalnum() and sign not in "|^?*+"]
    return list(dict.fromkeys([*" a1\n\\", *signs, *names]))[:MAX_PIECES]


def texts_against(expression: Expression) -> Iterator[str]:
    chosen = pieces(expression)
    for first in chosen:
        yield first * (N_CHARS // len(first))
        for second in chosen:
            if first != second:
                both = first + second
                yield both * (N_CHARS // len(both))
                yield first + second * (N_CHARS // len(second)) + "\x00"


def call(pattern: re.Pattern[Any], function: str, text: Any) -> None:
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    if function == "finditer":
        for _ in pattern.finditer(text):
            pass
    elif function == "sub":
        pattern.sub(lambda found: found[0], text)
    else:
        getattr(pattern, function)(text)


def ended_by(work: Callable[[], None]) -> int:
    """Signal that ended `work` in a child with CPU seconds; 0 for none."""
    child = os.fork()
    if not child:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            work()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0, ended
    return os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else 0


def try_all(expression: Expression) -> None:
    flags = expression.flags & ~re.UNICODE if isinstance(expression.pattern, bytes) else None
    pattern = re.compile(expression.pattern, expression.flags if flags is None else flags)
    for text in texts_against(expression):
        for function in expression.functions:
            is_text = isinstance(expression.pattern, str)
            call(pattern, function, text if is_text else text.encode("latin-1", "replace"))


def test_a_careless_expression_is_ended() -> None:
    careless = Expression("here", r"\\+u00", 0, frozenset({"search"}))
    assert ended_by(lambda: try_all(careless)) == signal.SIGPROF


def test_there_are_expressions_of_every_room() -> None:
    assert len(EXPRESSIONS) > 60


@pytest.mark.parametrize(
    "expression", EXPRESSIONS, ids=lambda one: one.place.removeprefix("mlxstack.")
)
def test_an_expression_takes_linear_time(expression: Expression) -> None:
    assert ended_by(lambda: try_all(expression)) == 0, expression
