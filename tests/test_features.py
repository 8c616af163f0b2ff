"""Every feature that mlx-stack owes its users is named by a test, or by a bench command."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
N_FEATURES = {
    "a": 15, "b": 19, "c": 17, "d": 24, "e": 20, "f": 9, "g": 12, "h": 8, "j": 3, "k": 6, "l": 4,
    "z": 14,
}  # fmt: skip
"""How many features each chapter has: command, doors, slots, prefix cache, scheduler, memory,
agents, dashboard, modes, bench, docs, and what nobody else has."""
FEATURES = [
    f"{chapter}{index + 1}" for chapter, count in N_FEATURES.items() for index in range(count)
]
NAME = re.compile(r"^(?:(?:async )?def )?(\w+)(?=\(| = )", re.MULTILINE)
"""Functions, and the state machines of Hypothesis, which are assigned."""
ID = re.compile(r"(?<=_)([a-z]\d{1,2})(?=_|$)")


def named() -> set[str]:
    """The ids in the names of all tests: `test_c4_c5_...` shows two."""
    texts = (file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py"))
    return {
        feature for text in texts for name in NAME.findall(text) for feature in ID.findall(name)
    }


def test_each_feature_has_a_test_that_carries_its_id() -> None:
    assert sorted({*FEATURES} - named()) == []
