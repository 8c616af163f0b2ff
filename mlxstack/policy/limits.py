"""The scheduler's limits, read off a preset."""

from mlxstack.core.preset import Preset
from mlxstack.policy.pacing import Pace
from mlxstack.policy.scheduler import Limits


def limits_of(preset: Preset, budget: int | None) -> Limits:
    """The scheduler's limits as the preset states them; `budget` is bytes of KV, or none."""
    block = preset.prefix_cache.block_size
    pace = Pace(
        max_stall_s=preset.pace.max_stall_ms / 1000, max_bite=preset.pace.max_bite, block=block
    )
    return Limits(
        max_active=preset.batch.max_size if preset.batch.enabled else 1,
        max_waiting=preset.queue.max_waiting,
        max_bytes=budget,
        aging_per_s=preset.pace.aging_per_s,
        pace=pace,
    )
