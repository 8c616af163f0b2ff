"""Idle unload: frees memory until the next request."""

import asyncio
import logging
import time
from functools import partial

from mlxstack.core.errors import Broken, Conflict, StackError, Unsupported
from mlxstack.core.preset import ServiceKind
from mlxstack.host.heap import allow_huge_pages, trim_heap
from mlxstack.service.calls import model_swap
from mlxstack.service.parts.gate import SwapGate
from mlxstack.service.parts.stats import n_processing
from mlxstack.service.service import Service, ServiceHealth

log = logging.getLogger("mlxstack.idle")

LOOK_S = 0.5
WAIT_S = 0.02


async def unload_when_idle(service: Service) -> None:
    """Unload the idle model, and reload it for a waiting request."""
    while True:
        if service.preset.server.idle_unload_s is None and service.gate.keep_alive_s != 0:
            service.gate.dismissed.clear()
            await service.gate.dismissed.wait()
        await asyncio.sleep(LOOK_S)
        if remaining_s(service) > 0:
            continue
        try:
            await unload(service)
            while service.is_unloaded:
                await service.gate.wanted.wait()
                async with service.gate.loading:
                    # A swap may have loaded another model meanwhile.
                    if service.is_unloaded:
                        await load(service)
        except StackError as error:
            log.error("%s", error.message)


async def unload_now(service: Service) -> None:
    """Unload the model as soon as no request is inside.

    Raises Unsupported where the preset never unloads it, Conflict when a request comes first, and
    Broken when the engine does not end.
    """
    if service.preset.server.idle_unload_s is None:
        raise Unsupported("this service keeps its model; set server.idle_unload_s of the preset")
    n_entered = service.gate.n_entered
    service.gate.keep_alive_s = 0.0
    while service.health is not ServiceHealth.UNLOADED:
        if service.gate.n_entered != n_entered:
            raise Conflict("a request came before the model was unloaded")
        if service.died.is_set():
            raise Broken(service.trouble)
        await asyncio.sleep(WAIT_S)


def idle_limit_s(service: Service) -> float:
    """Seconds without a request until the model is unloaded; inf for never.

    The `keep_alive` of the last request replaces that of the preset; where that has none, only 0
    counts, which asks for an unload.
    """
    limit = service.preset.server.idle_unload_s
    keep_alive_s = service.gate.keep_alive_s
    if service.preset.hosts or (limit is None and keep_alive_s != 0):
        return float("inf")
    return limit or 0.0 if keep_alive_s is None else keep_alive_s


def remaining_s(service: Service) -> float:
    """Seconds until the model is unloaded if no request comes."""
    limit = idle_limit_s(service)
    if service.health is not ServiceHealth.OK or limit == float("inf"):
        return float("inf")
    snapshot = service.engine.snapshot()
    if service.gate.n_inside or n_processing(snapshot) or snapshot.waiting:
        return max(limit, LOOK_S)
    return service.gate.left_at + limit - time.monotonic()


async def unload(service: Service) -> None:
    """Park all KV on disk, and unload the model; the gate closes.

    Raises Broken when parking takes too long: then the model stays. An engine that does not end
    is given up, as in a model swap.
    """
    resting = service.engine_factory.engine(service.preset)
    limit_s = service.preset.server.startup_timeout_s
    service.gate.close()
    try:
        if service.preset.kind is ServiceKind.CHAT:
            await model_swap.park(service, limit_s)
        model_swap.begin(service, service.preset, "unload", limit_s)
        freed, _ = await model_swap.unload(service, limit_s, is_idle=True)
        service.rest(service.preset, resting)
        for feature in service.features:
            await feature.after_idle_unload()
        await return_free_memory(service.gate)
    except BaseException:
        service.gate.left_at = time.monotonic()
        service.gate.open()
        raise
    finally:
        service.change = None
    log.info("%s was idle and is unloaded: %d bytes freed", service.name, freed.n_bytes)


async def load(service: Service) -> None:
    """Reload the model and open the gate; a failure fails waiting requests."""
    began = time.perf_counter()
    try:
        failure = await model_swap.try_load(service, service.preset)
        if failure:
            service.gate.wanted.clear()
            reason = f"{service.name} was unloaded while idle and cannot be loaded again: {failure}"
            log.error("%s", reason)
            service.gate.interrupt(Broken(reason))
            return
        await model_swap.warm(service)
    finally:
        service.change = None
    service.gate.open()
    log.info("%s is loaded again after %.1f s", service.name, time.perf_counter() - began)


async def return_free_memory(gate: SwapGate) -> None:
    """Return freed memory to the system; no huge pages until a request.

    The kernel would fill the freed parts again when it joins pages.
    """
    await asyncio.to_thread(trim_heap)
    if not gate.n_inside and not gate.wanted.is_set():
        allow_huge_pages(is_allowed=False)
        gate.on_next = partial(allow_huge_pages, is_allowed=True)
