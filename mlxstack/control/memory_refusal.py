"""Refusal of starts beyond the memory, with sum and alternatives."""

from collections.abc import Mapping

from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, DoesNotFit, SetupError
from mlxstack.core.preset import Preset
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import this_memory
from mlxstack.planner import candidate as plan_candidate
from mlxstack.planner import memory_check
from mlxstack.planner.ranking import proposal


def check_memory(preset: Preset, home: Home, env: Mapping[str, str]) -> str | None:
    """Raises SetupError, naming presets that fit, when this one cannot beside what runs.

    A model of unknown needs passes; the sentence on it is returned.
    """
    room = memory_check.room_in(home, this_memory(env), preset.name)
    try:
        found = plan_candidate.of_preset(preset)
    except (SetupError, BadRequest) as why:
        unknown: str | None = why.message
    else:
        try:
            unknown = memory_check.refuse_if_too_big(found, room)
        except DoesNotFit as why:
            left = replace(room.memory, usable=room.free)
            raise SetupError(f"{why.message}\n{proposal(home, left)}") from why
    return unknown and f"whether `{preset.name}` fits into memory is not checked: {unknown}"
