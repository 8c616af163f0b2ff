"""Routes that change or unload the model of a running service."""

import asyncio
from typing import Any

from litestar import post
from litestar.params import JSONBody
from msgspec import Struct

from mlxstack.api.guards import OF_ALL, UNLOADED
from mlxstack.api.run_generation import TheService
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Preset
from mlxstack.service.calls import idle_unload, model_swap
from mlxstack.service.calls.model_swap import SwapReport
from mlxstack.service.service import Service

DRAIN_S = 30.0


class LoadBody(Struct):
    """POST /v1/models/load: one of preset, model and handover.

    `preset` is the name of a listed preset, never a path. `model` is a hub id; with it only the
    model of the running preset is replaced. `handover` is the id of a preset that `mlx-stack swap
    FILE` wrote into the service's home, which only its owner can do. `prepare` fetches and checks
    it while the old one answers, and changes nothing.
    """

    preset: str | None = None
    model: str | None = None
    handover: str | None = None
    prepare: bool = False
    drain_s: float = DRAIN_S


@post("/v1/models/load", status_code=200, opt={**OF_ALL, **UNLOADED})
async def load_model(service: TheService, data: JSONBody[LoadBody]) -> SwapReport | dict[str, Any]:
    """Drain, park, unload, load, warm; other requests wait in the meantime."""
    preset = await _wanted(service, data)
    try:
        if data.prepare:
            checked = await model_swap.prepare(service, preset)
            return {"object": "model.prepared", "path": checked.path, "n_bytes": checked.n_bytes}
        if data.drain_s < 0:
            raise BadRequest(f"drain_s is {data.drain_s}; it must be 0 or more", "drain_s")
        # A disconnect of the client does not interrupt the swap.
        changing = asyncio.create_task(model_swap.swap(service, preset, data.drain_s))
        return await asyncio.shield(changing)
    except SetupError as error:
        raise BadRequest(error.message, "model" if data.model else "preset") from error


@post("/v1/models/unload", status_code=200, opt={**OF_ALL, **UNLOADED})
async def unload_model(service: TheService) -> dict[str, Any]:
    """Unload the model, its KV on disk; the next request loads it."""
    await idle_unload.unload_now(service)
    return {"object": "model.unloaded", "model": service.name}


async def _wanted(service: Service, data: LoadBody) -> Preset:
    engine_factory = service.engine_factory
    sources = [x for x in (data.preset, data.model, data.handover) if x is not None]
    if len(sources) != 1:
        raise BadRequest("give either a preset or a model", "preset")
    if data.model is not None:
        return await asyncio.to_thread(engine_factory.with_model, data.model, service.preset)
    find = engine_factory.preset if data.preset is not None else engine_factory.handover
    return await asyncio.to_thread(find, sources[0], service.preset)
