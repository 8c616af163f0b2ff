"""How much of a token sequence two contexts share."""

from collections.abc import Sequence

STRIDE = 1024


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix, in tokens; compares slices, so long ones are cheap."""
    end = min(len(one), len(other))
    at = 0
    while at < end and _same(one, other, at, min(at + STRIDE, end)):
        at = min(at + STRIDE, end)
    while at < end and one[at] == other[at]:
        at += 1
    return at


def _same(one: Sequence[int], other: Sequence[int], start: int, stop: int) -> bool:
    return list(one[start:stop]) == list(other[start:stop])
