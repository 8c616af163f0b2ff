"""Draft prefill: contexts of a draft model, computed beside decoding rows."""

from msgspec.structs import replace

from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.idle_work import IdleWork
from mlxstack.engine.loop import EngineLoop
from mlxstack.features.drafts.engine.draft_coordinator import DraftCoordinator
from mlxstack.policy.scheduling.chunked_prefill import stall_left


class DraftPrefill(IdleWork):
    """Computes what a draft model lacks of a row's tokens."""

    def __init__(self, loop: EngineLoop, drafts: DraftCoordinator) -> None:
        self._loop = loop
        self._drafts = drafts
        self._row: BatchRow | None = None

    def has_chunk(self) -> bool:
        """Whether the model is late with a row."""
        loop = self._loop
        self._row = self._drafts.late_row(loop.batch.rows, loop.slot_kv.has_room)
        return self._row is not None

    def run_chunk(self) -> None:
        """Compute a chunk of the row, unless it has ended since."""
        loop = self._loop
        if self._row is None or self._row not in loop.batch.rows:
            return
        speed = replace(loop.stats.speed, decode_s=loop.stats.step_s)
        self._drafts.catch_up(self._row, stall_left(speed, loop.prefill_policy))
        loop.slot_kv.note_growth()
