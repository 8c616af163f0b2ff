"""The slots and their desk, and what is to be done in a slot that is idle."""

import time
from collections.abc import Callable, Sequence

from mlxstack.core.errors import StackError
from mlxstack.engine.context import Context
from mlxstack.policy import desk as desks
from mlxstack.policy.desk import SeatState

Work = Callable[[Context], None]
Lost = Callable[[StackError], None]


class Holding:
    """Belongs to the MLX thread. A slot is held while an errand is at work in it."""

    def __init__(self, slots: Sequence[Context]) -> None:
        self.slots = slots
        self._desk = desks.empty_desk(len(slots))
        self._works: dict[str, tuple[Work, Lost | None]] = {}

    @property
    def is_holding(self) -> bool:
        """Whether an errand is at work in some slot."""
        return any(seat.state is SeatState.HELD for seat in self._desk.seats)

    def when_idle(self, errand: str, slot: int, work: Work, lost: Lost | None = None) -> None:
        """Call `work` with the slot's context once the slot is idle; it is held meanwhile.

        The errand is over when `release` is called for the slot. If the context breaks before it
        begins, and there is a `lost`, only that is called.
        """
        self._works[errand] = work, lost
        entry = desks.Errand(errand, slot, time.monotonic())
        self._desk = desks.request(self._desk, entry)

    def release(self, slot: int) -> None:
        """A held slot is idle again."""
        now = time.monotonic()
        self._desk = desks.release(self._desk, slot, len(self.slots[slot]), now)

    def _run(self, errand: desks.Errand) -> None:
        work, _ = self._works.pop(errand.id)
        work(self.slots[errand.slot])

    def _clear(self, slot: int, error: StackError) -> None:
        """The context is broken: nobody uses it, or saves what is left of it."""
        self.slots[slot].clear()
        for errand in self._desk.errands:
            _, lost = self._works[errand.id]
            if errand.slot == slot and lost is not None:
                del self._works[errand.id]
                self._desk = desks.dismiss(self._desk, errand)
                lost(error)
