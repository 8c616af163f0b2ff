"""Status frames of a service for dashboards."""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress

import psutil
from msgspec.structs import replace

from mlxstack import __version__
from mlxstack.core.commands import AgentKVLocation
from mlxstack.core.engine_snapshot import Counters, Snapshot
from mlxstack.core.errors import Unsupported
from mlxstack.core.status import (
    AgentView,
    CacheView,
    LoadView,
    MemoryView,
    RequestView,
    ServiceFacts,
    StatusFrame,
)
from mlxstack.core.usage import UsageSums
from mlxstack.engine.loading import hub_download
from mlxstack.host.memory_pressure import pressure_level
from mlxstack.models.model_files import weights_on_disk
from mlxstack.service.parts.disk_view import disk_view, with_disk
from mlxstack.service.parts.prefix_openings import with_openings
from mlxstack.service.parts.request_log import misses_of
from mlxstack.service.service import Service, ServiceHealth

MAX_PREFIXES = 20
MAX_REQUESTS = 50
MAX_AGENTS = 64
MAX_TURNS = 16
PROCESS = psutil.Process()
LOOK_S = 2.0
REST_S = 15.0


class StatusFeed:
    """Status frames of a service, for all of its watchers.

    The prefix cache is read rarely, since that takes a step of the engine. Nothing waits for it, so
    a stuck engine shows as stuck.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cache_view: CacheView | None = None
        self._kept: Mapping[str, AgentKVLocation] = {}
        self._coming: tuple[Future[CacheView], Future[tuple[AgentKVLocation, ...]]] | None = None
        self._asked_at = -REST_S
        self._done = (Counters(), 0)
        self._mode = ""

    def frame(self) -> StatusFrame:
        """Current frame with cache statistics, without past samples."""
        self._take()
        service = self._service
        memory = self._cache_view
        snapshot = self._service.snapshot()
        requests = service.request_log.requests()
        agents = self._agents(snapshot)
        frame = StatusFrame(
            at=time.time(),
            service=_facts(service, self._mode),
            snapshot=snapshot,
            snapshot_age_s=max(0.0, time.monotonic() - snapshot.at) if snapshot.at else 0.0,
            cache=None if memory is None else _with_details(service, memory, requests),
            agents=agents,
            requests=requests[:MAX_REQUESTS],
            n_agents=service.agent_registry.n_agents,
            memory=_memory(service, snapshot, memory),
            loading=_loading(service),
            today=_today(service),
            titles=_titles(service, snapshot, agents, requests[:MAX_REQUESTS]),
        )
        if self._coming is None and self._is_due(time.monotonic()):
            # A file that `mlx-stack mode` writes.
            self._mode = service.engine_factory.mode(service.preset.name)
            self._begin_look(tuple(agent.id for agent in agents))
        for feature in service.features:
            frame = feature.with_status(frame)
        return frame

    def _agents(self, snapshot: Snapshot) -> tuple[AgentView, ...]:
        """Most recent agents, with few turns: frames are frequent."""
        registry = self._service.agent_registry
        stored = self._service.agent_store.stored
        records = registry.latest[:MAX_AGENTS]
        views = registry.views(records, snapshot, self._service.name, self._kept, stored)
        return tuple(replace(view, turns=view.turns[-MAX_TURNS:]) for view in views)

    def _begin_look(self, agents: tuple[str, ...]) -> None:
        with suppress(Unsupported):
            cache = self._service.cache
            self._coming = cache.stats(MAX_PREFIXES), cache.locate_agents(agents)

    def _take(self) -> None:
        if self._coming is None:
            return
        stats, locations = self._coming
        if not (stats.done() and locations.done()):
            return
        if stats.exception() is None and locations.exception() is None:
            self._cache_view = stats.result()
            self._kept = {location.agent: location for location in locations.result()}
        self._coming = None

    def _is_due(self, now: float) -> bool:
        done = self._service.snapshot().counters, self._service.stats.n_cache_changes
        pause_s = LOOK_S
        if done == self._done:
            pause_s = REST_S
        if self._service.health is not ServiceHealth.OK or now < self._asked_at + pause_s:
            return False
        self._asked_at = now
        self._done = done
        return True


def _is_loaded(service: Service) -> bool:
    return service.health in (ServiceHealth.OK, ServiceHealth.STALLED)


def _with_details(
    service: Service, memory: CacheView, requests: tuple[RequestView, ...]
) -> CacheView:
    """Add the misses, and the first words of every prefix."""
    text_processor = None
    if _is_loaded(service):
        text_processor = service.text_processor
    prefixes = with_openings(memory.prefixes, service.agent_registry, text_processor)
    engine_factory = service.engine_factory
    disk = disk_view(engine_factory.store, engine_factory.counter)
    view = with_disk(memory, service.preset.prefix_cache.disk, disk)
    return replace(
        view,
        misses=misses_of(requests, MAX_PREFIXES),
        losses=service.request_log.losses,
        prefixes=prefixes,
    )


def _titles(
    service: Service,
    snapshot: Snapshot,
    agents: tuple[AgentView, ...],
    requests: tuple[RequestView, ...],
) -> dict[str, str]:
    """Titles of the agents that the rest of a frame names."""
    names = {view.id for view in agents} | {view.agent for view in requests}
    names |= {view.agent for view in snapshot.slots} | {view.agent for view in snapshot.waiting}
    titles = {name: service.agent_registry.title(name) for name in names if name}
    return {name: title.title for name, title in sorted(titles.items()) if title and title.title}


def _memory(service: Service, snapshot: Snapshot, memory: CacheView | None) -> MemoryView:
    """Divide the process memory: weights, KV, and workspace as the rest.

    Its resident memory lacks what a GPU holds, and untouched arrays.
    """
    system = psutil.virtual_memory()
    weights = 0
    if _is_loaded(service):
        weights = service.facts.n_bytes
    kv = snapshot.kv_bytes
    if memory is not None:
        kv = max(memory.memory_bytes, kv)
    held = max(snapshot.active_bytes + snapshot.cache_bytes, PROCESS.memory_info().rss)
    return MemoryView(
        total_bytes=system.total,
        available_bytes=system.available,
        weights_bytes=weights,
        live_bytes=snapshot.kv_bytes,
        parked_bytes=kv - snapshot.kv_bytes,
        workspace_bytes=max(0, held - weights - kv),
        swap_bytes=psutil.swap_memory().used,
        pressure=pressure_level().name.lower(),
    )


def _loading(service: Service) -> LoadView | None:
    """Progress of a load or download.

    The old model serves while the new one is downloaded.
    """
    for model, transfer in dict(hub_download.RUNNING).items():
        elapsed_s = time.monotonic() - transfer.began
        return LoadView(model, transfer.n_done, transfer.n_total, elapsed_s, is_download=True)
    if service.health not in (ServiceHealth.LOADING, ServiceHealth.SWAPPING):
        return None
    n_total = weights_on_disk(service.preset.model)
    n_done = max(0, service.engine_factory.active_bytes() - service.stats.bytes_before_load)
    elapsed_s = time.monotonic() - service.stats.load_began_at
    return LoadView(service.name, min(n_done, n_total), n_total, elapsed_s)


def _today(service: Service) -> UsageSums | None:
    days = [sums for feature in service.features if (sums := feature.today()) is not None]
    return days[0] if days else None


def _facts(service: Service, mode: str) -> ServiceFacts:
    preset = service.preset
    health = service.health
    architecture = ""
    if _is_loaded(service):
        architecture = service.facts.architecture
    return ServiceFacts(
        model=service.name,
        architecture=architecture,
        preset=preset.name,
        version=__version__,
        health=health.value,
        uptime_s=service.stats.uptime_s,
        n_ctx=service.n_ctx,
        max_waiting=preset.queue.max_waiting,
        budget_bytes=service.snapshot().kv_budget_bytes,
        mode=mode,
    )
