"""Names of variables, members, functions and tests in words that the project has left behind."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

GONE = frozenset(
    {"archive", "hands", "ledger", "listen", "maker", "obey", "owe", "pace", "passage", "sheet"}
    | {"shelved", "tell"}
)
"""Words that name nothing in the package any more: of a disk tier, a context, statistics, ..."""

FADING = frozenset({"act", "heads", "memory", "order", "turn", "verdict", "words"})
"""Words with a standard use beside the old one: memory in bytes, heads of an attention."""


def old_names(trees: Iterable[ast.AST]) -> Counter[str]:
    """How often each old word names something, with or without a leading underscore."""
    names = (name.lstrip("_") for tree in trees for name in _names(tree))
    return Counter(name for name in names if name in GONE | FADING)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
