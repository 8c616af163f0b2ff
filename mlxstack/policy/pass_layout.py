"""Layouts of the rows of a forward pass."""

from enum import Enum, auto


class PassLayout(Enum):
    """Layout in which a model computes rows of several tokens."""

    RAGGED = auto()
    """Every token is a row of one pass."""
    PADDED = auto()
    """All rows in one pass, padded to the longest."""
    APART = auto()
    """Rows of one token in one pass, each other row in its own."""
    ALONE = auto()
    """Each row in a pass of its own."""
