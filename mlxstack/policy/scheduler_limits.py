"""The scheduler's limits, read off a preset."""

from mlxstack.core.preset import Preset
from mlxstack.policy.chunked_prefill import PrefillPolicy
from mlxstack.policy.scheduler import SchedulerLimits
from mlxstack.policy.workspace import MAX_SCORE_BYTES


def limits_of(preset: Preset, budget: int | None, score_bytes: int = 0) -> SchedulerLimits:
    """The scheduler's limits as the preset states them; `budget` is bytes of KV, or none.

    `score_bytes` is what unfused attention stores per query token and context token.
    """
    block = preset.prefix_cache.block_size
    pace = PrefillPolicy(
        max_stall_s=preset.prefill.max_stall_ms / 1000,
        max_chunk_size=preset.prefill.chunk_size,
        block=block,
        score_bytes=score_bytes,
        max_score_bytes=MAX_SCORE_BYTES,
    )
    return SchedulerLimits(
        max_active=preset.batch.max_size if preset.batch.enabled else 1,
        max_waiting=preset.queue.max_waiting,
        max_bytes=budget,
        aging_per_s=preset.queue.aging_per_s,
        pace=pace,
    )
