"""Row groupers: rows that decode together on KV in common arrays."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.kv.slot_context import SlotContext


class RowGroup(Protocol):
    """Contexts with KV in common arrays."""

    def views(self) -> list[Any]:
        """View of each layer for one token per row."""


GroupRows = Callable[[Sequence[SlotContext]], RowGroup | None]
"""Groups contexts; None where no layer can be grouped."""


class RowGrouper(Protocol):
    """Groups the rows of a batch where it pays."""

    def views(self, rows: Sequence[BatchRow]) -> list[Any] | None:
        """View of each layer for the next step; None without a group."""

    def release(self) -> None:
        """Give all KV back to the rows' own caches."""


class NoGroups:
    """Every row keeps to its own caches."""

    def views(self, rows: Sequence[BatchRow]) -> None:
        """None for any rows."""

    def release(self) -> None:
        """Nothing to give back."""


NO_GROUPS = NoGroups()
