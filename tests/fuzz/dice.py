"""Choices drawn from bytes, so that a fuzzer that changes bytes changes choices."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
ODD = (
    "", " ", "\x00", "\n", "\u2028", "\ud800", "\U0001f9e0", "e\u0301", "\ufdd0", "\uff1c", "null",
    "-1", "1e999", "'", '"', "\\", "../", "<", "</", "{", "}", "[", "]", "{{", "}}", "{%", "%}",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 7, 20, 255, 2**31, -(2**31), 2**63, -(2**63) - 1, 2**64, 10**400)
FRACTIONS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-320, 1e308, float("inf"), float("nan"))


class Dice:
    """Once the bytes are used up, every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to choose with."""
        return self._at >= len(self._data)

    def below(self, n: int) -> int:
        """A number from 0 to `n` - 1."""
        n_bytes = 1 if n <= 256 else 2
        taken = self.take(n_bytes)
        return int.from_bytes(taken, "little") % n if taken else 0

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self.below(len(choices))]

    def chance(self, percent: int) -> bool:
        """True so often; never once the bytes are used up."""
        return not self.is_over and self.below(100) < percent

    def take(self, n: int) -> bytes:
        """So many bytes, fewer at the end."""
        taken = self._data[self._at : self._at + n]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def text(self, args: Sequence[str] = ODD) -> str:
        """A few of the words, with letters between them."""
        parts = []
        for _ in range(self.below(6)):
            parts.append(self.pick(args))
            parts.append(self.take(self.below(8)).decode("utf-8", "replace"))
        return "".join(parts)

    def number(self) -> int | float:
        """An ordinary or an extreme one."""
        if self.chance(40):
            return self.pick(FRACTIONS)
        return self.pick(NUMBERS) if self.chance(50) else self.below(2000) - 1000
