"""Parameters that repeat what others show, left to `make soak`."""

from collections.abc import Collection
from typing import Any

import pytest


def in_soak(*values: Any) -> list[Any]:
    """These parameters, run with `--soak` only; a tuple is one set of several arguments."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.soak) for row in rows]


def all_in_soak(values: Collection[Any], *always: Any) -> list[Any]:
    """All of these parameters; those that do not run `always` with `--soak` only."""
    assert set(always) <= set(values)
    return [*always, *in_soak(*(value for value in values if value not in always))]
