"""Background tasks: warm prefixes, watch memory and disk, log a summary."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from mlxstack.core.commands import CollectGarbage
from mlxstack.core.errors import Loading, StackError
from mlxstack.core.preset import ServiceKind
from mlxstack.host import memory_pressure
from mlxstack.host.memory_pressure import PressureLevel
from mlxstack.service.calls import prefix_cache_admin
from mlxstack.service.calls.idle_unload import return_free_memory, unload_when_idle
from mlxstack.service.calls.prefix_warmup import warm_all
from mlxstack.service.parts.neighbors import Neighbors
from mlxstack.service.service import Service

log = logging.getLogger("mlxstack.tasks")

LOOK_S = 5.0
SWEEP_S = 600.0
NEIGHBORS_S = 1.0
SAMPLE_S = 1.0
REST_S = 10.0
WORK_S = 2.0
"""CPU seconds without a request after which freed memory is returned."""


async def run_tasks(
    service: Service, level: Callable[[], PressureLevel] = memory_pressure.pressure_level
) -> None:
    """Run until cancelled. `level` is the memory pressure of the computer."""
    spec = service.preset.prefix_cache
    async with asyncio.TaskGroup() as group:
        sample = partial(_sample, service)
        group.create_task(_every(SAMPLE_S, "the count of tokens", sample))
        group.create_task(return_memory(service, REST_S))
        if not service.preset.hosts:
            group.create_task(unload_when_idle(service))
        if service.preset.kind is ServiceKind.EMBEDDING:
            return
        if spec.warm_on_startup:
            group.create_task(warm_all(service))
        if spec.metrics.enabled:
            group.create_task(log_statistics(service, spec.metrics.log_interval))
        relieve = partial(_relieve, service, level)
        group.create_task(_every(LOOK_S, "the relief of memory", relieve))
        neighbors = service.feature(Neighbors)
        if neighbors is not None:
            divide = partial(_divide, service, neighbors)
            group.create_task(_every(NEIGHBORS_S, "the division of memory", divide))
        sweep = partial(_sweep, service)
        group.create_task(_every(SWEEP_S, "the sweep of the disk", sweep))


async def log_statistics(service: Service, interval_s: float) -> None:
    """Log a line of statistics every `interval_s` seconds, without request text."""
    await asyncio.sleep(interval_s)
    await _every(interval_s, "the summary", lambda: _log_summary(service))


async def _log_summary(service: Service) -> None:
    view = await prefix_cache_admin.look(service, 1)
    counters = service.snapshot().counters
    log.info(
        "requests=%d hits=%d prompt=%d cached=%d generated=%d saved=%.1fs "
        "memory=%d/%d entries=%d evicted=%d",
        view.hour.n_requests, view.hour.n_hits, view.hour.n_prompt, view.hour.n_cached,
        counters.n_generated_tokens, view.hour.saved_s, view.memory_bytes,
        view.memory_budget or 0, view.n_entries, view.n_evicted,
    )  # fmt: skip


async def _sample(service: Service) -> None:
    """Sample the throughput, for the charts of dashboards that connect later."""
    service.stats.sample(service.snapshot().counters)


async def return_memory(service: Service, interval_s: float) -> None:
    """Return freed memory to the system after work, once idle.

    Status feeds and refused bodies do not enter the gate: their work shows as CPU time.
    """
    n_before = 0
    worked_s = time.process_time()

    async def trim() -> None:
        nonlocal n_before, worked_s
        gate = service.gate
        is_same = gate.n_entered == n_before and time.process_time() - worked_s < WORK_S
        if gate.n_inside or is_same:
            return
        n_before = gate.n_entered
        await return_free_memory(gate)
        worked_s = time.process_time()

    await _every(interval_s, "the return of memory", trim)


async def _divide(service: Service, neighbors: Neighbors) -> None:
    """Divide memory again when another service of the home starts or stops."""
    if not service.is_unloaded:
        service.require()
        await neighbors.divide(service.preset, service.generator)


async def _every(interval_s: float, name: str, action: Callable[[], Awaitable[None]]) -> None:
    """Repeat an action; a failure is logged and stops nothing else."""
    while True:
        try:
            await action()
        except Loading:
            pass  # While the model is changed there is nothing to do.
        except StackError as error:
            log.warning("%s failed: %s", name, error)
        except Exception:
            log.exception("%s failed", name)
        await asyncio.sleep(interval_s)


async def _sweep(service: Service) -> None:
    """Delete KV beyond the disk bounds, of other processes too."""
    disk = service.preset.prefix_cache.disk
    if disk.max_bytes is not None or disk.max_age_s is not None:
        service.require()
        await asyncio.wrap_future(service.generator.sweep(CollectGarbage()))


async def _relieve(service: Service, level: Callable[[], PressureLevel]) -> None:
    """Reclaim cold KV under memory pressure, pinned KV never."""
    now = await asyncio.to_thread(level)
    if now is PressureLevel.CALM:
        return
    freed = await asyncio.wrap_future(service.cache.reclaim(now))
    if freed.n_bytes:
        log.warning("memory pressure %s: evicted %d bytes of KV", now.name.lower(), freed.n_bytes)
