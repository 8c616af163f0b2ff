"""Every feature that mlx-stack owes its users is named by a test, or by a bench command."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
N_FEATURES = {
    "a": 15, "b": 19, "c": 17, "d": 24, "e": 20, "f": 9, "g": 12, "h": 8, "j": 3, "k": 6, "l": 4,
    "z": 14,
}  # fmt: skip
"""How many features each chapter has: command, doors, slots, prefix cache, scheduler, memory,
agents, dashboard, modes, bench, docs, and what nobody else has."""
FEATURES = [f"{chapter}{at + 1}" for chapter, count in N_FEATURES.items() for at in range(count)]


def named() -> set[str]:
    """The ids in the names of all tests: `test_c4_c5_...` shows two."""
    found: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        for name in _tests(ast.parse(file.read_text(encoding="utf-8"))):
            found.update(re.findall(r"(?<=_)([a-z]\d{1,2})(?=_|$)", name))
    return found


def _tests(tree: ast.Module) -> Iterator[str]:
    """Functions, and the state machines of Hypothesis, which are assigned."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (one.id for one in node.targets if isinstance(one, ast.Name))


NAMED = named()


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_has_a_test_that_carries_its_id(feature: str) -> None:
    assert feature in NAMED
