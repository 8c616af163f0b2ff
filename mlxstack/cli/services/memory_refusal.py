"""Refuses a start that cannot fit into memory, with the sum and with what would fit."""

from collections.abc import Mapping

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Preset
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import this_memory
from mlxstack.service import memory_check, plan_candidate


def check_memory(preset: Preset, home: Home, env: Mapping[str, str]) -> str | None:
    """Raises SetupError when the preset cannot fit beside what runs.

    A model whose needs nobody can tell beforehand passes, with a word on why.
    """
    room = memory_check.room_in(home, this_memory(env), preset.name)
    try:
        found = plan_candidate.of_preset(preset)
    except (SetupError, BadRequest) as why:
        unknown: str | None = why.message
    else:
        unknown = memory_check.refuse_if_too_big(found, room)
    return unknown and f"whether `{preset.name}` fits into memory is not checked: {unknown}"
