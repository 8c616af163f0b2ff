"""Memory that running services leave, by the claims of each."""

import os
from contextlib import suppress

from msgspec import Struct

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.host import services
from mlxstack.host.hardware import MemoryBudget
from mlxstack.host.home import Home
from mlxstack.host.process import held_bytes
from mlxstack.host.services import ServiceSpec, ServiceState, read_json
from mlxstack.planner.candidate import of_preset
from mlxstack.policy.memory.capacity import ServiceLoad, need
from mlxstack.policy.memory.memory_shares import MemoryClaim


class MemoryRoom(Struct, frozen=True):
    """Memory of this computer, and bytes that each running service may take."""

    memory: MemoryBudget
    claims: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Bytes that one more service may take."""
        return self.memory.usable - sum(self.claims.values())


class MemberService(Struct, frozen=True):
    """Part of a gateway's spec: a service behind it."""

    service: ServiceSpec


class GatewayMemory(Struct, frozen=True):
    """Part of a gateway's spec: `members` that take turns within `budget` bytes."""

    budget: int
    members: tuple[MemberService, ...]


def room_in(home: Home, memory: MemoryBudget, but: str | None = None) -> MemoryRoom:
    """Memory next to all running services but `but` and this process itself."""
    taken = {
        service_claim.name: service_claim.least for service_claim in claims_in(home, memory, but)
    }
    for name, gateway in gateways_in(home).items():
        for member in gateway.members:
            taken[name] = taken.get(name, 0) + taken.pop(member.service.name, 0)
    return MemoryRoom(memory, taken)


def claim_of(preset: Preset, memory: MemoryBudget, name: str) -> MemoryClaim:
    """Claim of a preset's service. Raises SetupError, BadRequest."""
    load = of_preset(preset).load(memory)
    if preset.kind is ServiceKind.EMBEDDING:
        return MemoryClaim(name, need(load).total, share=0)
    return claim(load, name)


def claim(load: ServiceLoad, name: str = "") -> MemoryClaim:
    """Claim of a service that keeps KV."""
    parts = need(load)
    share = load.budget
    fixed_share = None if share is None else share.n_bytes
    return MemoryClaim(name, parts.total - parts.kv, parts.kv, fixed_share)


def gateways_in(home: Home) -> dict[str, GatewayMemory]:
    """Memory of each running gateway, by its name."""
    names = [state.spec.name for state in services.running(home) if services.is_gateway(state.spec)]
    memories = {name: read_json(home.gateway_file(name), GatewayMemory) for name in names}
    return {name: gateway for name, gateway in memories.items() if gateway is not None}


def claims_in(home: Home, memory: MemoryBudget, but: str | None) -> tuple[MemoryClaim, ...]:
    """Claims of all running services but `but` and this process itself.

    Members of a gateway take turns: its own claim is negative where theirs exceed its budget.
    """
    running = [state for state in services.running(home) if state.spec.name != but]
    counted = [state for state in running if not (state.worker and state.worker.pid == os.getpid())]
    claims = {state.spec.name: _claim(home, state, memory) for state in counted}
    for name, gateway in gateways_in(home).items():
        members = [claims[m.service.name] for m in gateway.members if m.service.name in claims]
        excess = max(0, sum(member.least for member in members) - gateway.budget)
        if name in claims:
            claims[name] = MemoryClaim(name, -excess, share=0)
    return tuple(claims.values())


def _claim(home: Home, state: ServiceState, memory: MemoryBudget) -> MemoryClaim:
    """Claim of a running service; its footprint where its model is unknown."""
    name = state.spec.name
    if services.is_gateway(state.spec):
        # Its plan leaves nothing for its own process, which the system's reserve covers.
        return MemoryClaim(name, 0, share=0)
    preset = read_json(home.preset_file(name), Preset)
    if preset is not None:
        with suppress(SetupError, BadRequest):
            return claim_of(preset, memory, name)
    process = state.worker or state.supervisor
    return MemoryClaim(name, held_bytes(process.pid), share=0)
