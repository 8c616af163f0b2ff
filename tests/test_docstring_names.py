"""Names in backquotes of a docstring exist: in its module, or as a definition of the package."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import mlxstack

PACKAGE = Path(mlxstack.__file__).parent
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`")
WORD = re.compile(r"[A-Za-z_]\w*")
MAX_TEXT = 200
"""Longer texts of a module are prose, whose words are no names."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# Names of MLX and its sources, of libraries, templates, protocols, files and results.
FOREIGN = {
    "A.bin", "LLTokenizer", "MLX_STACK_", "MLX_STACK_BATCH_MAX_SIZE", "Path.glob", "Range",
    "__matmul__", "applegpu_g17s", "auto", "chat_template_caps", "clear_thinking", "developer",
    "device.cpp",
    "device_info", "false", "has_fused_kernel", "is_nax_available", "json_object", "mx.load",
    "mx.random.categorical", "num_ctx", "preserve_thinking", "thinking_mode", "update_cell",
    "tool_removal",
    "use_fallback",
    "accepted", "fork_s", "gap_s", "hash_s", "join_s", "leave_s", "token_s",
}  # fmt: skip


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every docstring with the name of its owner."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", "module"), text


def definitions(tree: ast.Module) -> set[str]:
    """Functions, classes and annotated members."""
    nodes = list(ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, DEFINITIONS)} | {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def used(tree: ast.Module) -> set[str]:
    """Every name of a module: variables, members, arguments, keys in its texts."""
    prose = {text for _, text in docstrings(tree)}
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.keyword(arg=str(name)):
                names.add(name)
            case ast.alias():
                names |= {*node.name.split("."), node.asname or ""}
            case ast.Constant(value=str(text)) if len(text) < MAX_TEXT and text not in prose:
                names |= set(WORD.findall(text))
    return names


def missing(package: Path) -> list[str]:
    """Quoted names that do not exist, as `file: owner: name`."""
    trees = {file: ast.parse(file.read_text("utf-8")) for file in sorted(package.rglob("*.py"))}
    everywhere = {
        *dir(builtins),
        *(part for file in trees for part in (file.stem, file.parent.name)),
    }
    everywhere = everywhere.union(*map(definitions, trees.values()))
    unknown = []
    for file, tree in trees.items():
        quoted = [
            (owner, name)
            for owner, text in docstrings(tree)
            for name in NAME.findall(text)
            if name not in FOREIGN and not everywhere.issuperset(name.split("."))
        ]
        names = everywhere | used(tree) if quoted else everywhere
        unknown += [
            f"{file.relative_to(package)}: {owner}: {name}"
            for owner, name in quoted
            if not names.issuperset(name.split("."))
        ]
    return unknown


def test_names_in_docstrings_exist() -> None:
    assert missing(PACKAGE) == []


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        '"""Uses `here`, `gone` and `some.there`."""\nhere = there = 1\n'
    )
    assert missing(tmp_path) == ["some.py: module: gone"]
