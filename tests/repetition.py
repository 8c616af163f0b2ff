"""Parameters that repeat what others show, left to `make soak`."""

from typing import Any

import pytest


def in_soak(*values: Any) -> list[Any]:
    """These parameters, run with `--soak` only; a tuple is one set of several arguments."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.soak) for row in rows]
