"""The slots and their desk, and what is to be done in a slot that is idle."""

import time
from collections.abc import Callable, Sequence

from mlxstack.core.errors import StackError
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.policy import scheduler_state as desks
from mlxstack.policy.scheduler_state import SlotState

Work = Callable[[SlotContext], None]
Lost = Callable[[StackError], None]


class SlotReservations:
    """Belongs to the MLX thread. A slot is held while an errand is at work in it."""

    def __init__(self, slots: Sequence[SlotContext]) -> None:
        self.slots = slots
        self._state = desks.initial_state(len(slots))
        self._works: dict[str, tuple[Work, Lost | None]] = {}

    @property
    def is_holding(self) -> bool:
        """Whether an errand is at work in some slot."""
        return any(slot.state is SlotState.HELD for slot in self._state.slots)

    def when_idle(self, pending: str, slot: int, work: Work, lost: Lost | None = None) -> None:
        """Call `work` with the slot's context once the slot is idle; it is held meanwhile.

        The errand is over when `release` is called for the slot. If the context breaks before it
        begins, and there is a `lost`, only that is called.
        """
        self._works[pending] = work, lost
        entry = desks.SlotAction(pending, slot, time.monotonic())
        self._state = desks.enqueue_action(self._state, entry)

    def release(self, slot: int) -> None:
        """A held slot is idle again."""
        now = time.monotonic()
        self._state = desks.release_slot(self._state, slot, len(self.slots[slot]), now)

    def _run(self, pending: desks.SlotAction) -> None:
        work, _ = self._works.pop(pending.id)
        work(self.slots[pending.slot])

    def _clear(self, slot: int, error: StackError) -> None:
        """The context is broken: nobody uses it, or saves what is left of it."""
        self.slots[slot].clear()
        for pending in self._state.actions:
            _, lost = self._works[pending.id]
            if pending.slot == slot and lost is not None:
                del self._works[pending.id]
                self._state = desks.drop_action(self._state, pending)
                lost(error)
