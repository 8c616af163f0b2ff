"""Refuses a start that cannot fit into memory, with the sum and with what would fit."""

from collections.abc import Mapping

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Preset
from mlxstack.host.memory import this_memory
from mlxstack.host.paths import Home
from mlxstack.service import candidate, fit


def check_memory(preset: Preset, home: Home, env: Mapping[str, str]) -> str | None:
    """Raises SetupError when the preset cannot fit beside what runs.

    A model whose needs nobody can tell beforehand passes, with a word on why.
    """
    room = fit.room_in(home, this_memory(env), preset.name)
    try:
        found = candidate.of_preset(preset)
    except (SetupError, BadRequest) as why:
        fit.refuse_whole_windows(preset)
        unknown: str | None = why.message
    else:
        unknown = fit.refuse_if_too_big(found, room)
    return unknown and f"whether `{preset.name}` fits into memory is not checked: {unknown}"
