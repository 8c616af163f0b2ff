"""KV budget of a service among the services of its home.

Each service with a loaded model writes the bytes that it holds for KV to a file of the home, under
one lock. It writes a larger number before it uses it, and a smaller one after it has released KV.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.formatting import size
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.host import services
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home, make_folder
from mlxstack.host.process import ProcessId, identify, is_alive
from mlxstack.host.services import locked, read_json, write_json
from mlxstack.planner.memory_room import claim_of, claims_in, gateways_in
from mlxstack.policy.memory.memory_shares import MemoryClaim, free_beside, granted, kv_budgets
from mlxstack.service.parts.service_feature import ServiceFeature

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine

log = logging.getLogger("mlxstack.tasks")

RESERVE_S = 10.0
POLL_S = 0.1
"""Maximum wait for room before a load, and between two looks."""

OWN = ""
"""Name of this service in the division."""


class MemoryGrant(Struct, frozen=True):
    """Bytes that the process `holder` takes for KV."""

    kv: int
    holder: ProcessId


def grants_in(home: Home) -> dict[str, int]:
    """KV bytes of each service whose worker runs."""
    files = home.memory.glob("[!.]*.json")
    grants = {file.stem: read_json(file, MemoryGrant) for file in files}
    return {name: grant.kv for name, grant in grants.items() if grant and is_alive(grant.holder)}


class Neighbors(ServiceFeature):
    """Divides the memory of a home; `name` is this service's."""

    def __init__(self, home: Path, name: str) -> None:
        self._home = Home(home)
        self._name = name
        self._known: object = None
        self._claims: tuple[MemoryClaim, tuple[MemoryClaim, ...], int] | None = None
        self._applied: tuple[object, int] | None = None
        self._has_model = False
        """Whether a model is loaded or will be, so that memory may be held."""

    async def before_load(self, preset: Preset) -> None:
        await asyncio.to_thread(self.reserve, preset)

    async def after_load(self, preset: Preset, engine: "ChatEngine", facts: ModelFacts) -> None:
        await self.divide(preset, engine)

    async def after_idle_unload(self) -> None:
        await asyncio.to_thread(self.release)

    def reserve(self, preset: Preset) -> None:
        """Reserve room for weights and full slots before a load."""
        end = time.monotonic() + RESERVE_S
        while (missing := self.try_reserve(preset)) > 0:
            if time.monotonic() > end:
                log.warning("other services still hold %s of this one's share", size(missing))
                self.hold(0)
                return
            time.sleep(POLL_S)

    async def divide(self, preset: Preset, engine: "ChatEngine") -> None:
        """Bound the KV of an engine by the share of this service."""
        budget = await asyncio.to_thread(self.share, preset)
        if budget is None or self._applied == (engine, budget):
            return
        await asyncio.wrap_future(engine.cache.limit(budget))
        await asyncio.to_thread(self.hold, budget)
        self._applied = engine, budget
        log.info("KV may take %s beside the other services", size(budget))

    def try_reserve(self, preset: Preset) -> int:
        """Hold KV of full slots, or a smaller share; bytes still missing."""
        self._has_model = True
        claims = self._claims_beside(preset)
        if claims is None:
            return 0
        own, beside, ceiling = claims
        share = kv_budgets((own, *beside), ceiling)[own.name]
        with self._locked() as grants:
            budget = min(own.least - own.fixed, share)
            free = free_beside(own, beside, grants, ceiling)
            if free >= budget:
                self._write(budget)
        return budget - free

    def share(self, preset: Preset) -> int | None:
        """Share of this service now, or None; growth is held at once."""
        claims = self._claims_beside(preset)
        if claims is None:
            return None
        own, beside, ceiling = claims
        with self._locked() as grants:
            budget = granted(own, beside, grants, ceiling)
            if budget > grants.get(self._name, 0):
                self._write(budget)
        return budget

    def hold(self, budget: int) -> None:
        """Note that KV takes so many bytes at most from now on."""
        with self._locked():
            self._write(budget)

    def release(self) -> None:
        """Give back the reservation, after the model was unloaded."""
        with self._locked():
            self._has_model = False
            self._home.memory_file(self._name).unlink(missing_ok=True)
        self._applied = None

    def _write(self, budget: int) -> None:
        """Hold KV, unless the model was unloaded in the meantime."""
        holder = identify(os.getpid())
        if self._has_model and holder is not None:
            write_json(self._home.memory_file(self._name), MemoryGrant(budget, holder))

    @contextmanager
    def _locked(self) -> Iterator[dict[str, int]]:
        """KV bytes of the running services, while none changes."""
        make_folder(self._home.memory)
        with locked(self._home.memory / "lock"):
            yield grants_in(self._home)

    def _claims_beside(
        self, preset: Preset
    ) -> tuple[MemoryClaim, tuple[MemoryClaim, ...], int] | None:
        """Claims of this service and of the others, and the ceiling, or None."""
        inputs = preset, services.served(self._home), gateways_in(self._home)
        if inputs != self._known:
            memory = this_memory(os.environ)
            try:
                own = claim_of(preset, memory, OWN)
            except (SetupError, BadRequest) as why:
                log.info("the other services of the home are not counted: %s", why.message)
                self._claims = None
            else:
                self._claims = own, claims_in(self._home, memory, self._name), memory.usable
            self._known = inputs
        return self._claims
