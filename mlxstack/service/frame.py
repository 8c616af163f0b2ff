"""Draws what a watcher of this service sees now."""

import time
from functools import cache

from mlxstack import __version__
from mlxstack.core.frame import Frame, ServiceFacts
from mlxstack.host.machine import machine
from mlxstack.service.service import Health, Service


def frame_of(service: Service) -> Frame:
    """Cheap, and possible at any time, also while the model loads or after it broke."""
    snapshot = service.engine.snapshot()
    age_s = time.monotonic() - snapshot.at if snapshot.at else 0.0
    return Frame(
        at=time.time(),
        service=_facts(service),
        snapshot=snapshot,
        snapshot_age_s=max(0.0, age_s),
    )


def _facts(service: Service) -> ServiceFacts:
    preset, health = service.preset, service.health
    is_loaded = health in (Health.OK, Health.STALLED)
    return ServiceFacts(
        model=service.name,
        architecture=service.facts.architecture if is_loaded else "",
        preset=preset.name,
        version=__version__,
        health=health.value,
        uptime_s=time.time() - service.started_at,
        n_ctx=service.n_ctx,
        max_waiting=preset.queue.max_waiting,
        budget_bytes=round(_memory() * preset.prefix_cache.memory_budget_pct / 100),
    )


@cache
def _memory() -> int:
    return machine().total_bytes
