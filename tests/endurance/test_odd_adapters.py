"""A slice of the odd adapters; `make soak` loads them all."""

from pathlib import Path

import pytest

from tests.endurance.odd_adapters import odd_adapters

pytestmark = [pytest.mark.mlx, pytest.mark.slow]
SLICE = frozenset(
    {"sound", "config: scale as text", "config: rank of a billion", "matrices: not a number"}
)


def test_an_odd_adapter_is_served_or_refused_in_words(tmp_path: Path) -> None:
    outcome = odd_adapters(tmp_path, SLICE)
    assert not outcome.faults
    assert (outcome.n_served, outcome.n_refused) == (1, 3)


@pytest.mark.soak
def test_all_odd_adapters_are_served_or_refused_in_words(tmp_path: Path) -> None:
    outcome = odd_adapters(tmp_path)
    assert not outcome.faults
    assert outcome.n_served
    assert outcome.n_refused
