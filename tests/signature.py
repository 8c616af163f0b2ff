"""The package in numbers: sizes of files and functions, density, import cycles, annotations.

`python -m tests.signature` prints them as `make size`.
"""

import ast
import io
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from operator import add
from pathlib import Path
from typing import TypeGuard

from msgspec import Struct
from msgspec.structs import astuple
from rich.console import Console
from rich.table import Table

PACKAGE = "mlxstack"
ROOT = Path(__file__).parent.parent / PACKAGE
FEATURES = f"{PACKAGE}.features"
NOT_IN_THE_WHEEL = ("bench/dev", "demo/training")
"""Folders that `exclude` of pyproject.toml leaves out of the wheel."""

Def = ast.FunctionDef | ast.AsyncFunctionDef
Tree = Sequence[ast.AST]
"""All nodes of a module, the module first."""

MAX_WORDS = 12
"""Words of the first line of a docstring, by the style page of docs/contributing.md."""

HEADLESS = re.compile(r"(What|Who|How|Which|Those|Of) ")
PEOPLE = re.compile(
    r"\b(nobody|somebody|whoever|everybody|anybody|someone|anyone)\b", re.IGNORECASE
)
BRITISH = re.compile(
    r"\b\w*(behaviour|colour|favour|neighbour|optimis(?!m|t)|normalis|tokenis|quantis|serialis"
    r"|summaris|initialis|recognis|organis|prioritis)\w*",
    re.IGNORECASE,
)


EMPTY_NAMES = frozenset(
    re.findall(
        r"\w+",
        "one found told given wanted made known sent kept shown said spoken rest other others "
        "each every this what why how at here there",
    )
)
"""Names that do not say what a variable holds."""


class Density(Struct, frozen=True):
    """How much a package packs into its lines, those of folders outside the wheel too."""

    n_files: int
    n_lines: int
    n_code: int
    """Lines of code without imports."""
    n_bound: int
    """Names that are bound: targets and parameters."""
    n_empty: int
    """Bound names of `EMPTY_NAMES`."""
    n_conditionals: int
    """Conditional expressions."""
    n_tuples: int
    """Assignments of a tuple of values to a tuple of names."""
    n_comprehensions: int

    def __add__(self, addend: "Density") -> "Density":
        sums = (mine + theirs for mine, theirs in zip(astuple(self), astuple(addend), strict=True))
        return Density(*sums)

    @property
    def empty_share(self) -> float:
        """Share of names that do not say what they hold."""
        return self.n_empty / max(1, self.n_bound)

    def per_thousand(self, n: int) -> float:
        """Occurrences in 1,000 lines."""
        return 1000 * n / max(1, self.n_lines)


class Signature(Struct, frozen=True):
    """Lines per file and per function, ascending, and what breaks the rules by name."""

    files: tuple[int, ...]
    functions: tuple[int, ...]
    longest_file: str
    longest_function: str
    bare: tuple[str, ...]
    same_class_names: tuple[str, ...]
    long_summaries: tuple[str, ...]
    badly_worded: tuple[str, ...]
    cycle: tuple[str, ...]
    circles: tuple[str, ...]
    """Rooms of one folder that import each other, in functions and for types too."""
    n_public: int
    code_lines: dict[str, int]
    """Code lines in the wheel, by package."""
    density: dict[str, Density]
    """By package."""


def measure(root: Path = ROOT) -> Signature:
    """Read every module under `root`, without importing any."""
    trees = {
        file: [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        for file in root.rglob("*.py")
    }
    files = sorted((_n_lines(file), _name(root, file)) for file in trees)
    found = [(file, node) for file, tree in trees.items() for node in tree if isinstance(node, Def)]
    functions = sorted((_length(node), f"{_name(root, file)}.{node.name}") for file, node in found)
    public = [(file, node) for file, node in found if not node.name.startswith("_")]
    return Signature(
        files=tuple(n for n, _ in files),
        functions=tuple(n for n, _ in functions),
        longest_file=files[-1][1],
        longest_function=functions[-1][1],
        bare=tuple(
            f"{_name(root, f)}.{node.name}" for f, node in public if not _is_annotated(node)
        ),
        same_class_names=tuple(
            sorted(name for name, n in _classes(trees.values()).items() if n > 1)
        ),
        long_summaries=tuple(
            f"{_name(root, file)}: {summary}"
            for file, tree in trees.items()
            for summary in _summaries(tree)
            if len(summary.split()) > MAX_WORDS
        ),
        badly_worded=tuple(
            f"{_name(root, file)}: {text}"
            for file, tree in trees.items()
            for text in _badly_worded(tree)
        ),
        cycle=_cycle({_name(root, f): set(_imports(t)) for f, t in trees.items()}),
        circles=tuple(_circles({_name(root, f): set(_any_imports(t)) for f, t in trees.items()})),
        n_public=len(public),
        code_lines=_code_lines_by_package(root, trees),
        density=_density_by_package(root, trees),
    )


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that `share` of all do not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def code_lines(source: str, tree: Tree | None = None) -> int:
    """Lines that hold code: no imports, blanks, comments, docstrings; `tree` is parsed source."""
    no_code = {
        line
        for node in tree or ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in layout
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - no_code)


def _code_lines_by_package(root: Path, trees: Mapping[Path, Tree]) -> dict[str, int]:
    found = Counter[str]()
    for file, tree in trees.items():
        path = file.relative_to(root)
        if not any(path.is_relative_to(folder) for folder in NOT_IN_THE_WHEEL):
            found[path.parts[0]] += code_lines(file.read_text(encoding="utf-8"), tree)
    return dict(sorted(found.items()))


def density(source: str, tree: Tree) -> Density:
    """Density of one module; `tree` is parsed `source`."""
    names = [name for node in tree for name in _bound_names(node)]
    return Density(
        n_files=1,
        n_lines=len(source.splitlines()),
        n_code=code_lines(source, tree),
        n_bound=len(names),
        n_empty=sum(name in EMPTY_NAMES for name in names),
        n_conditionals=sum(isinstance(node, ast.IfExp) for node in tree),
        n_tuples=sum(_assigns_tuple(node) for node in tree),
        n_comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in tree),
    )


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def _assigns_tuple(node: ast.AST) -> bool:
    """Whether a statement packs several assignments into one."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def _density_by_package(root: Path, trees: Mapping[Path, Tree]) -> dict[str, Density]:
    by_package: dict[str, Density] = {}
    for file, tree in trees.items():
        package = file.relative_to(root).parts[0]
        measured = density(file.read_text(encoding="utf-8"), tree)
        before = by_package.get(package)
        by_package[package] = measured if before is None else before + measured
    return dict(sorted(by_package.items()))


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a statement is nothing but a string: a docstring, of an attribute too."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _n_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _name(root: Path, file: Path) -> str:
    parts = (root.name, *file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _classes(trees: Iterable[Tree]) -> Counter[str]:
    nodes = (node for tree in trees for node in tree)
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def _docstrings(tree: Tree) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | Def
    texts = (ast.get_docstring(node) for node in tree if isinstance(node, documented))
    return (text for text in texts if text)


def _summaries(tree: Tree) -> Iterator[str]:
    """First lines of all docstrings."""
    return (text.splitlines()[0] for text in _docstrings(tree))


def _badly_worded(tree: Tree) -> Iterator[str]:
    """Docstrings with a headless first line, people for mechanisms, or British spelling."""
    return (
        text.splitlines()[0]
        for text in _docstrings(tree)
        if HEADLESS.match(text) or PEOPLE.search(text) or BRITISH.search(text)
    )


def _length(node: Def) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _is_annotated(node: Def) -> bool:
    every = node.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    given = [arg for arg in named if arg is not None and arg.arg not in {"self", "cls"}]
    return node.returns is not None and all(arg.annotation is not None for arg in given)


def _imports(tree: Tree) -> Iterator[str]:
    """Modules of ours that are imported when this one is: not inside functions or for types."""
    module = tree[0]
    assert isinstance(module, ast.Module)
    for node in module.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)


def _cycle(graph: dict[str, set[str]]) -> tuple[str, ...]:
    # A package whose names come from its own modules is no loop: Python finds the module first.
    edges = {
        name: {one for one in found if one in graph and not name.startswith(f"{one}.")}
        for name, found in graph.items()
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def _any_imports(tree: Tree) -> Iterator[str]:
    """Modules of ours that are imported anywhere, and names of theirs."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def _circles(graph: dict[str, set[str]]) -> Iterator[str]:
    """Each folder whose files and folders have no order from low to high, with one loop of it."""
    folders = {name.rpartition(".")[0] for name in graph}
    for folder in sorted(folders - {""}):
        rooms: dict[str, set[str]] = {}
        for name, imports in graph.items():
            room = _room(folder, name)
            if room is not None:
                ours = (_room(folder, one) for one in imports if one in graph)
                others = {one for one in ours if one is not None and one != room}
                rooms.setdefault(room, set()).update(others)
        if loop := _cycle(rooms):
            yield f"{folder}: {' -> '.join(loop)}"


def _room(folder: str, module: str) -> str | None:
    """The file or folder of `folder` that holds a module; none for features.

    Those stand beside the floors: assemblies register them, as contracts of import-linter say.
    """
    if module.startswith(FEATURES) and not folder.startswith(FEATURES):
        return None
    inside = module.removeprefix(f"{folder}.")
    return inside.partition(".")[0] if inside != module else None


def _density_table(by_package: Mapping[str, Density]) -> Table:
    columns = ("package", "files", "code lines", "empty names", "conditionals", "tuples", "compr.")
    table = Table(*columns, title="density; the last three per 1,000 lines")
    total = reduce(add, by_package.values())
    for package, measured in [*by_package.items(), ("all", total)]:
        counts = (measured.n_conditionals, measured.n_tuples, measured.n_comprehensions)
        table.add_row(
            package,
            f"{measured.n_files:,}",
            f"{measured.n_code:,}",
            f"{measured.empty_share:.1%}",
            *(f"{measured.per_thousand(n):.1f}" for n in counts),
        )
    return table


def main() -> None:
    """Print the tables."""
    found = measure()
    table = Table("what", "p50", "p90", "max", "the largest", title=f"{len(found.files)} files")
    for what, values, name in (
        ("lines of a file", found.files, found.longest_file),
        ("lines of a function", found.functions, found.longest_function),
    ):
        numbers = [percentile(values, 0.5), percentile(values, 0.9), values[-1]]
        table.add_row(what, *map(str, numbers), name)
    console = Console()
    console.print(table)
    console.print(_density_table(found.density))
    console.print(f"lines: {sum(found.files):,}   functions: {len(found.functions):,}")
    by_package = ", ".join(f"{name} {n:,}" for name, n in found.code_lines.items())
    console.print(f"code lines in the wheel: {sum(found.code_lines.values()):,} ({by_package})")
    console.print(
        f"public functions annotated: {found.n_public - len(found.bare)}/{found.n_public}"
    )
    console.print(f"first lines of docstrings above {MAX_WORDS} words: {len(found.long_summaries)}")
    console.print(f"class names of two classes: {', '.join(found.same_class_names) or 'none'}")
    console.print(f"import cycle: {' -> '.join(found.cycle) or 'none'}")
    console.print(f"rooms that import each other: {'; '.join(found.circles) or 'none'}")


if __name__ == "__main__":
    main()
