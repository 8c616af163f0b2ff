"""The mutants fit the code; `make mutants` shows that each is noticed."""

from pathlib import Path

from tests.mutants.rows import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def is_there(mutant: Mutant) -> bool:
    """Whether it switches one place off, and its test exists."""
    path, _, name = mutant.test.partition("::")
    n_places = (ROOT / mutant.file).read_text().count(mutant.old)
    return n_places == 1 and f"def {name}" in (ROOT / path).read_text()


def test_what_a_mutant_switches_off_is_there_once() -> None:
    # One test: each worker collects all, which takes longer than to look.
    assert [mutant.protection for mutant in MUTANTS if not is_there(mutant)] == []


def test_each_protection_has_a_sentence_of_its_own() -> None:
    assert len({mutant.protection for mutant in MUTANTS}) == len(MUTANTS)
