"""Refusal of starts beyond the memory, with sum and alternatives."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import AUTO, Preset, ServiceKind
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import this_memory
from mlxstack.policy.capacity import kv_budget
from mlxstack.service import memory_check, plan_candidate
from mlxstack.service.memory_check import MemoryRoom
from mlxstack.service.plan_candidate import Candidate

SMALLEST_PCT, LARGEST_PCT = 1, 90


class FittedPreset(Struct, frozen=True):
    """Preset that fits now; `unchecked`: reason for unknown needs."""

    preset: Preset
    unchecked: str | None = None


def check_memory(preset: Preset, home: Home, env: Mapping[str, str]) -> FittedPreset:
    """Raises SetupError when the preset cannot fit beside what runs.

    A model of unknown needs passes, with a word on why. Beside other services the KV budget
    `auto` becomes the share that they leave.
    """
    room = memory_check.room_in(home, this_memory(env), preset.name)
    try:
        found = plan_candidate.of_preset(preset)
    except (SetupError, BadRequest) as why:
        unknown: str | None = why.message
    else:
        unknown = memory_check.refuse_if_too_big(found, room)
        if unknown is None:
            preset = _beside(found, room)
    why_not = unknown and f"whether `{preset.name}` fits into memory is not checked: {unknown}"
    return FittedPreset(preset, why_not)


def _beside(found: Candidate, room: MemoryRoom) -> Preset:
    """The preset with the KV budget that the other services leave."""
    preset, cache = found.preset, found.preset.prefix_cache
    is_fixed = cache.memory_budget_pct != AUTO or preset.kind is ServiceKind.EMBEDDING
    if is_fixed or not room.others:
        return preset
    load = found.load(room.memory.half_bytes)
    left = kv_budget(room.free, load.weights, load.workspace)
    pct = min(LARGEST_PCT, max(SMALLEST_PCT, 100 * left / room.memory.total))
    return replace(preset, prefix_cache=replace(cache, memory_budget_pct=pct))
