"""The slots and their desk, and what is to be done in a slot that is idle."""

import time
from collections.abc import Callable, Sequence

from mlxstack.core.errors import StackError
from mlxstack.engine.context import SlotContext
from mlxstack.policy import desk as desks
from mlxstack.policy.desk import SlotState

Work = Callable[[SlotContext], None]
Lost = Callable[[StackError], None]


class SlotReservations:
    """Belongs to the MLX thread. A slot is held while an errand is at work in it."""

    def __init__(self, slots: Sequence[SlotContext]) -> None:
        self.slots = slots
        self._desk = desks.initial_state(len(slots))
        self._works: dict[str, tuple[Work, Lost | None]] = {}

    @property
    def is_holding(self) -> bool:
        """Whether an errand is at work in some slot."""
        return any(seat.state is SlotState.HELD for seat in self._desk.slots)

    def when_idle(self, errand: str, slot: int, work: Work, lost: Lost | None = None) -> None:
        """Call `work` with the slot's context once the slot is idle; it is held meanwhile.

        The errand is over when `release` is called for the slot. If the context breaks before it
        begins, and there is a `lost`, only that is called.
        """
        self._works[errand] = work, lost
        entry = desks.SlotAction(errand, slot, time.monotonic())
        self._desk = desks.enqueue_action(self._desk, entry)

    def release(self, slot: int) -> None:
        """A held slot is idle again."""
        now = time.monotonic()
        self._desk = desks.release_slot(self._desk, slot, len(self.slots[slot]), now)

    def _run(self, errand: desks.SlotAction) -> None:
        work, _ = self._works.pop(errand.id)
        work(self.slots[errand.slot])

    def _clear(self, slot: int, error: StackError) -> None:
        """The context is broken: nobody uses it, or saves what is left of it."""
        self.slots[slot].clear()
        for errand in self._desk.actions:
            _, lost = self._works[errand.id]
            if errand.slot == slot and lost is not None:
                del self._works[errand.id]
                self._desk = desks.drop_action(self._desk, errand)
                lost(error)
