"""Every model on disk as a member of one gateway."""

import os
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from mlxstack.control.launch import LaunchRequest
from mlxstack.control.model_request import request_for
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import this_memory
from mlxstack.models.reference import service_name
from mlxstack.planner.memory_check import refuse_if_too_big, room_in
from mlxstack.policy.memory.capacity_advice import SlotSizes


class ModelsOnDisk(Struct, frozen=True):
    """Start requests of the models that can be served, and why others cannot."""

    wanted: tuple[LaunchRequest, ...]
    left_out: dict[str, str]


def find_all(home: Home, first: Sequence[str], sets: tuple[str, ...]) -> ModelsOnDisk:
    """Requests for `first`, then for every complete model on disk. Raises SetupError.

    Incomplete ones, those of unknown types and those that do not fit alone are left out.
    """
    from mlxstack.models.local_models import all_models  # noqa: PLC0415 - slow, rarely needed

    wanted = [request_for(one, home, SlotSizes(), sets).launch for one in first]
    room = room_in(home, this_memory(os.environ))
    given = {*first}
    others = (one for one in all_models(home) if given.isdisjoint((one.name, one.path)))
    models = list({one.name: one for one in others}.values())
    n_names = Counter(_service(one.name) for one in models)
    left_out = {}
    for one in models:
        if not one.is_complete:
            left_out[one.name] = f"incomplete; `mlx-stack pull {one.name}` goes on"
            continue
        own = list(sets)
        if n_names[_service(one.name)] > 1:
            own.append(f"name={service_name(one.name)}")
        if one.where == "LM Studio":
            own.append(f"model.alias={one.name}")
        try:
            found = request_for(one.name, home, SlotSizes(), tuple(own))
            if found.derived is not None:
                refuse_if_too_big(found.derived.candidate, room)
        except (SetupError, BadRequest) as why:
            left_out[one.name] = why.message
            continue
        wanted.append(found.launch)
    if not wanted:
        raise SetupError(
            "no model on this disk can be served; `mlx-stack plan` proposes some, and "
            "`mlx-stack pull MODEL` downloads one" + _told(left_out)
        )
    return ModelsOnDisk(tuple(wanted), left_out)


def _service(model: str) -> str:
    return service_name(model.rpartition("/")[2])


def _told(left_out: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {why}" for name, why in left_out.items())
