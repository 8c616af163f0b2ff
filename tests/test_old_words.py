"""Variables are called after their types, or after their roles in words of the glossary."""

import ast
from collections import Counter
from pathlib import Path

from tests.old_words import FADING, GONE, old_names

ROOT = Path(__file__).parents[1]
NOT_IN_THE_WHEEL = ("bench/dev", "demo/training")

MAX_IN_THE_PACKAGE = 164
MAX_IN_THE_TESTS = 154
"""Names in fading words, standard uses included; the limits only ever fall."""


def names_in(root: Path) -> Counter[str]:
    files = [
        file
        for file in root.rglob("*.py")
        if not any(file.relative_to(root).is_relative_to(folder) for folder in NOT_IN_THE_WHEEL)
    ]
    return old_names(ast.parse(file.read_text(encoding="utf-8")) for file in files)


def test_the_package_names_nothing_in_words_that_are_gone() -> None:
    counts = names_in(ROOT / "mlxstack")
    assert not GONE & counts.keys(), counts
    assert sum(counts.values()) <= MAX_IN_THE_PACKAGE, counts


def test_the_tests_name_fewer_and_fewer_things_in_old_words() -> None:
    counts = names_in(ROOT / "tests")
    assert sum(counts.values()) <= MAX_IN_THE_TESTS, counts


def test_every_binding_of_an_old_word_is_found() -> None:
    source = """
words = 1
def tell(order, *, pace): ...
class Any:
    verdict: int
    def _obey(self):
        self._ledger = self.archive  # read only
        for marks in (): ...
        return [heads for heads in ()]
"""
    counts = old_names([ast.parse(source)])
    assert set(counts) == FADING - {"act", "memory", "turn"} | {"ledger", "obey", "pace", "tell"}
