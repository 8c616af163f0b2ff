"""A small siege; `make soak` lays the whole one."""

from pathlib import Path

import pytest

from tests.endurance.siege import Force, siege

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]

SMALL = Force(
    40,
    n_slow=4,
    n_silent=4,
    n_vanishing=10,
    n_huge=2,
    n_feeds=100,
    n_tiny=200,
    rest_s=0,
    most_kept=1.15,
)
MAX_GROWTH = 160_000_000
"""Bytes of memory that a small siege may cost; two bodies of 100 MB, if kept, are more."""


def test_e18_more_clients_than_slots_silent_ones_and_huge_bodies(tmp_path: Path) -> None:
    (outcome,) = siege(tmp_path, SMALL)
    assert outcome.n_served == SMALL.n_clients
    assert outcome.n_slow_served == SMALL.n_slow
    assert outcome.n_too_large == SMALL.n_huge
    assert outcome.bytes_most - outcome.bytes_before < MAX_GROWTH


@pytest.mark.soak
def test_memory_after_three_sieges_is_at_most_15_percent_more(tmp_path: Path) -> None:
    # Waits of four medians come on busy cores, and say nothing about memory.
    outcomes = siege(tmp_path, Force(most_wait=10.0), n_times=3)
    assert [outcome.n_feeds for outcome in outcomes] == [500, 500, 500]
