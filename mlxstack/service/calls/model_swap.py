"""Model swap while clients wait: drain, park, unload, load, warm; or back."""

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from mlxstack.core.errors import Broken, Conflict, Loading, StackError, describe_error
from mlxstack.core.preset import Preset
from mlxstack.service.calls.prefix_warmup import warm_all
from mlxstack.service.engine_factory import CheckedModel
from mlxstack.service.service import Change, Service, ServiceHealth, ended

if TYPE_CHECKING:
    from mlxstack.service.service import AnyEngine

log = logging.getLogger("mlxstack.swap")

STOP_S = 30.0
"""Seconds for an overdue load to end and free its memory."""
LOOK_S = 1.0
"""Seconds between two looks at the progress of a load."""
UNDER_WAY = "another change of models is under way; wait for its end"


class SwapStep(Struct, frozen=True):
    """One step, with milliseconds and bytes.

    drain: `count` requests were finished. park: `count` contexts, bytes newly written. unload:
    bytes freed. load: bytes of the weights. warm: `count` prefixes.
    """

    name: str
    ms: float
    n_bytes: int = 0
    count: int = 0


class ActiveBytes(Struct, frozen=True):
    """Memory of MLX around a model swap."""

    before_load: int
    after_unload: int


class SwapReport(Struct, frozen=True):
    """Report of a model swap: models, steps and memory of MLX."""

    before: str
    model: str
    steps: tuple[SwapStep, ...]
    active_bytes: ActiveBytes
    object: str = "model.loaded"


async def prepare(service: Service, preset: Preset) -> CheckedModel:
    """Download and check the next model while this one answers. Raises SetupError."""
    return await asyncio.to_thread(service.engine_factory.check, preset)


async def swap(service: Service, preset: Preset, drain_s: float) -> SwapReport:
    """Serve `preset` from now on; new requests wait at the gate.

    Those under way may take `drain_s` seconds, then they fail as Busy. Raises SetupError when the
    model is not there, Conflict when another change is under way, and Broken when it could not be
    loaded: then the old one answers again, or stays unloaded. Parking and unloading may each take
    `server.startup_timeout_s`, and a load so long without progress. One that goes on after that
    keeps its memory, so no other model can be loaded: the service gives up, to be restarted with
    the old preset.
    """
    if service.is_unloaded:
        # Requests fail together when the unloaded model cannot be loaded for one of them.
        async with service.gate.interruptible():
            await prepare(service, preset)
        if service.change is not None or service.gate.loading.locked():
            raise Conflict(UNDER_WAY)
        if service.is_unloaded:
            async with service.gate.loading:
                return await _load_instead(service, preset)
    else:
        service.require()
        _refuse_if_closed(service)
        # As a request this keeps the model loaded.
        await service.gate.enter()
        try:
            await prepare(service, preset)
        finally:
            service.gate.leave()
    service.require()
    _refuse_if_closed(service)
    service.gate.close()
    try:
        return await _change(service, preset, drain_s)
    finally:
        service.change = None
        service.gate.open()


async def _change(service: Service, preset: Preset, drain_s: float) -> SwapReport:
    old = service.preset
    name = service.name
    limit_s = service.preset.server.startup_timeout_s
    held = service.stats.bytes_before_load
    begin(service, preset, "drain", drain_s + limit_s)
    steps = [await _drain(service, drain_s)]
    begin(service, preset, "park", limit_s)
    steps.append(await park(service, limit_s))
    if service.health is ServiceHealth.STOPPING:
        raise Loading("the service is shutting down; the model was not changed")
    begin(service, preset, "unload", limit_s)
    freed, free = await unload(service, limit_s)
    began = time.perf_counter()
    if failure := await try_load(service, preset):
        await _go_back(service, old, failure)
    steps += [freed, SwapStep("load", _ms(began), service.facts.n_bytes)]
    return await _complete(service, name, steps, ActiveBytes(held, free))


async def _load_instead(service: Service, preset: Preset) -> SwapReport:
    """Load another model than the unloaded one, which stays when it fails."""
    old = service.preset
    name = service.name
    free = await asyncio.to_thread(service.engine_factory.active_bytes)
    began = time.perf_counter()
    try:
        if failure := await try_load(service, preset):
            service.rest(old, service.engine_factory.engine(old))
            raise Broken(
                f"{preset.model.served_name} was not loaded, {name} stays unloaded: {failure}"
            )
        load = SwapStep("load", _ms(began), service.facts.n_bytes)
        return await _complete(service, name, [load], ActiveBytes(free, free))
    finally:
        service.change = None
        if not service.is_unloaded:
            # The task that would load the old model for a request waits for one.
            service.gate.wanted.set()
            service.gate.open()


async def _complete(
    service: Service, before: str, steps: list[SwapStep], active_bytes: ActiveBytes
) -> SwapReport:
    """Warm the loaded model, and write its preset if that is possible."""
    # A stuck engine is the watchdog's matter, so the warm-up has no limit.
    begin(service, service.preset, "warm", math.inf)
    steps.append(await warm(service))
    try:
        await asyncio.to_thread(service.engine_factory.keep, service.preset)
    except StackError as error:
        log.warning("after a restart the old model will be served: %s", error.message)
    log.info("%s was changed for %s: %s", before, service.name, _line(steps))
    return SwapReport(before, service.name, tuple(steps), active_bytes)


def begin(service: Service, preset: Preset, step: str, limit_s: float) -> None:
    """Set the step that is under way, for /health."""
    service.change = Change(preset.model.served_name, step, time.monotonic(), limit_s)


async def _drain(service: Service, drain_s: float) -> SwapStep:
    began = time.perf_counter()
    n_before = service.gate.n_inside
    n_left = await service.gate.emptied(drain_s)
    if n_left:
        log.warning("%d requests were not over after %.1f s and fail", n_left, drain_s)
    return SwapStep("drain", _ms(began), count=n_before - n_left)


async def park(service: Service, limit_s: float) -> SwapStep:
    """Park all KV before the unload. Raises Broken when overdue."""
    began = time.perf_counter()
    await service.write_histories()
    try:
        async with asyncio.timeout(limit_s):
            parked = await asyncio.wrap_future(service.generator.park())
    except TimeoutError:
        raise Broken(
            f"the KV of {service.name} was not parked within {limit_s:g} s; the model was not "
            "changed"
        ) from None
    return SwapStep("park", _ms(began), parked.n_bytes, parked.n_contexts)


async def unload(
    service: Service, limit_s: float, *, is_idle: bool = False
) -> tuple[SwapStep, int]:
    """Unload the model; returns the step and MLX's remaining bytes."""
    before = service.engine.snapshot().active_bytes
    began = time.perf_counter()
    await service.unload_model(limit_s, is_idle=is_idle)
    free = await asyncio.to_thread(service.engine_factory.active_bytes)
    return SwapStep("unload", _ms(began), max(0, before - free)), free


async def _load(service: Service, preset: Preset, engine: "AnyEngine") -> None:
    """Load a model while it makes progress.

    Raises its load error, else TimeoutError.
    """
    limit_s = preset.server.startup_timeout_s
    loading = asyncio.ensure_future(service.load_model(preset, engine))
    n_reports = 0
    ends_at = time.monotonic() + limit_s
    try:
        while time.monotonic() < ends_at:
            await asyncio.wait({loading}, timeout=min(LOOK_S, limit_s))
            if loading.done():
                loading.result()
                return
            if engine.load_progress.n_reports > n_reports:
                n_reports = engine.load_progress.n_reports
                ends_at = time.monotonic() + limit_s
                begin(service, preset, "load", limit_s + STOP_S)
        raise TimeoutError
    finally:
        loading.cancel()
        await asyncio.wait({loading})


async def try_load(service: Service, preset: Preset) -> str:
    """Load a preset; returns "" or the reason of the failure.

    A model that failed is freed. Raises Broken, and gives the service up, when the load took too
    long and does not end.
    """
    limit_s = preset.server.startup_timeout_s
    begin(service, preset, "load", limit_s + STOP_S)
    try:
        engine = service.engine_factory.engine(preset)
    except Exception as error:
        return describe_error(error, "a new engine").message
    try:
        await _load(service, preset, engine)
    except TimeoutError:
        limit = f"{limit_s:g} s (server.startup_timeout_s)"
        last_step = engine.load_progress.step or "nothing was reported"
        failure = (
            f"{preset.model.served_name} was not loaded, without progress for {limit} after: "
            f"{last_step}"
        )
    except Exception as error:
        failure = describe_error(error, "loading").message
    else:
        return ""
    if not await ended(engine, STOP_S):
        reason = f"{failure}, and its load does not end; the service has to start again"
        service.give_up(reason)
        raise Broken(reason)
    return failure


async def _go_back(service: Service, old: Preset, failure: str) -> None:
    """Load the old model again; always raises Broken."""
    refused = service.name
    log.error("%s; going back to the model before", failure)
    if again := await try_load(service, old):
        reason = f"{failure}; and the model before cannot be loaded again: {again}"
        service.give_up(reason)
        raise Broken(reason)
    await warm(service)
    raise Broken(f"{refused} was not loaded, {service.name} answers again: {failure}")


async def warm(service: Service) -> SwapStep:
    """Compute the prefixes of the preset again."""
    began = time.perf_counter()
    spec = service.preset.prefix_cache
    if spec.warm_on_startup:
        await warm_all(service)
    return SwapStep(
        "warm", _ms(began), count=len(spec.warm_prefixes) if spec.warm_on_startup else 0
    )


def _refuse_if_closed(service: Service) -> None:
    if service.gate.is_closed:
        raise Conflict(UNDER_WAY)


def _ms(began: float) -> float:
    return 1000 * (time.perf_counter() - began)


def _line(steps: list[SwapStep]) -> str:
    return ", ".join(f"{step.name} {step.ms:.0f} ms {step.n_bytes} bytes" for step in steps)
