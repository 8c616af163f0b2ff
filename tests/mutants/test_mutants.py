"""The list of mutants fits the code and the page; `make mutants` shows that each is noticed."""

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.rows import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.protection)
def test_what_a_mutant_switches_off_is_there_once(mutant: Mutant) -> None:
    assert (ROOT / "mlxstack" / mutant.file).read_text().count(mutant.old) == 1
    path, _, name = mutant.test.partition("::")
    assert f"def {name}" in (ROOT / path).read_text()


def test_the_page_of_the_tests_lists_every_mutant() -> None:
    page = (ROOT / "tests" / "README.md").read_text()
    for mutant in MUTANTS:
        name = mutant.test.rpartition("/")[2].rpartition("::")[2]
        assert f"| {mutant.protection} | `{mutant.file}` | `{name}` |" in page
