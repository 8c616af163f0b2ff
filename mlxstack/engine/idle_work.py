"""Idle work: chunks that are computed in steps without a prompt."""

from collections.abc import Collection

from mlxstack.core.engine_events import SlotAssigned
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.request import Request


class IdleWork:
    """One kind of work beside requests. MLX thread only.

    A chunk runs at the end of a step that computes no prompt, with no decode step in flight, and
    stays within the bound on stalls.
    """

    @property
    def is_pending(self) -> bool:
        """Whether the loop makes steps for it alone."""
        return False

    @property
    def slots(self) -> Collection[int]:
        """Idle slots whose contexts it changes."""
        return ()

    def has_chunk(self) -> bool:
        """Whether a chunk is due in this step, which computes no prompt."""
        return False

    def run_chunk(self) -> None:
        """Compute the chunk that was due. Raises DeviceError."""

    def end(self, slot: int | None = None) -> None:
        """End the work in a slot, or in all; its KV stays."""

    def observe(self, request: Request, position: int, event: SlotAssigned) -> SlotAssigned:
        """The event of a request that reuses `position` tokens, completed."""
        return event

    def report(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what the work adds."""
        return snapshot
