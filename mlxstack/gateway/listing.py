"""Gateway's own responses: health, models, metrics; members stay unloaded."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import httpx
from litestar import Litestar, Request, Response, get, head, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import UNSET
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxstack import __version__
from mlxstack.api import errors, guards
from mlxstack.api.dialects.lm_studio.response_schema import (
    Capabilities,
    LMStudioListedModel,
    quantization,
)
from mlxstack.api.dialects.ollama.response_schema import (
    OLLAMA_VERSION,
    OllamaDetails,
    OllamaModel,
    rfc3339,
)
from mlxstack.api.guards import OF_ALL, PUBLIC
from mlxstack.api.host_rules import host_guard
from mlxstack.api.protocols import dialect_of
from mlxstack.api.web_page import PAGE_ROUTES, page_or
from mlxstack.core.errors import UnknownModel, Unsupported
from mlxstack.core.preset import ApiKey, ServiceKind
from mlxstack.gateway.agent_members import AgentMembers
from mlxstack.gateway.members import MemberGate, Members
from mlxstack.gateway.processes import object_of
from mlxstack.gateway.spec import GatewayMember, GatewaySpec, internal_key, names_of
from mlxstack.policy.kv.conversation_id import is_implicit

AGENTS = "/v1/agents"
LM_STUDIO = "/api/v0/models"
LM_STUDIO_V1 = "/api/v1/models"
LOAD = "/v1/models/load"
CONTEXTS = ("max_input_tokens", "max_tokens", "context_length", "max_model_len")
STARTED = int(time.time())
"""Seconds since the epoch, for models whose start is unknown."""
FIXED = "a gateway loads and unloads its members itself; start it again with other members"
METRICS_TYPE = "text/plain; version=0.0.4"
COUNTERS = {
    "requests": ("Requests passed on", attrgetter("n_requests")),
    "loads": ("Times that the member was started or loaded", attrgetter("n_loads")),
}
GAUGES = {
    "active": ("Requests inside", attrgetter("n_active")),
    "waiting": ("Requests that wait for the member", attrgetter("n_waiting")),
    "loaded": ("1 while it is loaded", attrgetter("is_loaded")),
    "reserved_bytes": ("Bytes that it may take", attrgetter("spec.n_bytes")),
}

TheMembers = NamedDependency[Members]
TheSpec = NamedDependency[GatewaySpec]
TheAgentMembers = NamedDependency[AgentMembers]


@get("/", opt=PUBLIC)
async def root(request: Request[Any, Any, Any]) -> Response[Any]:
    """Name, version and status; for a browser the web page."""
    return page_or(request, {"name": "mlx-stack", "version": __version__, "status": "ok"})


@head(
    ["/", "/api/hello", "/api/tags", "/api/version", "/health", "/v1/health", "/v1/models"],
    opt=PUBLIC,
)
async def probe() -> None:
    """Reachability probe of clients."""


@get(["/health", "/v1/health"], opt=PUBLIC)
async def health(members: TheMembers) -> dict[str, Any]:
    """200 while the gateway serves, whatever its members do."""
    phases = {name: member.notice_end().value for name, member in members.by_name.items()}
    return {"status": "ok", "members": phases}


@get(["/v1/models", "/models"], opt=PUBLIC)
async def list_models(members: TheMembers, spec: TheSpec) -> dict[str, Any]:
    """List every member, loaded or loadable."""
    cards = await asyncio.gather(*(model_card(member, spec) for member in members.by_name.values()))
    models = [{"name": card["id"], "model": card["id"], "type": "model"} for card in cards]
    return {
        "object": "list",
        "data": cards,
        "models": models,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
        "has_more": False,
    }


@get(["/v1/models/{name:path}", "/models/{name:path}"], opt=PUBLIC)
async def get_model(members: TheMembers, spec: TheSpec, name: FromPath[str]) -> dict[str, Any]:
    """Model by one of its names."""
    return await model_card(_member_of(members, name), spec)


@get("/api/version", opt=PUBLIC)
async def version() -> dict[str, str]:
    """Release of Ollama that clients may take the gateway for."""
    return {"version": OLLAMA_VERSION}


@get("/api/tags", opt=PUBLIC)
async def list_tags(members: TheMembers) -> dict[str, Any]:
    """Models of all members."""
    return {"models": await _gathered(members.by_name.values(), "/api/tags", "models", _tag)}


@get("/api/ps", opt=PUBLIC)
async def list_processes(members: TheMembers) -> dict[str, Any]:
    """Models in memory."""
    return {"models": await _gathered(members.by_name.values(), "/api/ps", "models", None)}


@get("/api/v0/models", opt=PUBLIC)
async def list_lm_studio_models(members: TheMembers) -> dict[str, Any]:
    """Models of all members with their states."""
    return {
        "object": "list",
        "data": await _gathered(members.by_name.values(), LM_STUDIO, "data", _lm_studio_model),
    }


@get("/api/v0/models/{name:path}", opt=PUBLIC)
async def get_lm_studio_model(members: TheMembers, name: FromPath[str]) -> dict[str, Any]:
    """Model with its state by one of its names."""
    member = _member_of(members, name)
    (entry,) = await _gathered([member], LM_STUDIO, "data", _lm_studio_model)
    return dict(entry)


@get(LM_STUDIO_V1, opt=PUBLIC)
async def list_lm_studio_v1_models(members: TheMembers) -> dict[str, Any]:
    """Models of all members with their loaded instances."""
    gates = members.by_name.values()
    return {"models": await _gathered(gates, LM_STUDIO_V1, "models", _listed_model)}


@get("/v1/agents")
async def list_agents(
    request: Request[Any, Any, Any],
    members: TheMembers,
    spec: TheSpec,
    agent_members: TheAgentMembers,
    model: FromQuery[str | None] = None,
) -> dict[str, Any]:
    """List the agents of all members that run, the last used first.

    One that several members know is shown by the member that served it last. A key for some models
    sees the agents that these served last. `model` chooses one member. Raises UnknownModel.
    """
    holder = guards.key_of(request)
    key = internal_key(spec.secret, request.state.get("key"))
    chosen = list(members.by_name.values())
    if model:
        chosen = [_chosen(members, spec, model)]
    allowed = [member for member in chosen if guards.is_for(holder, member.spec.all_names)]
    bodies = await asyncio.gather(*(_read(member, "/v1/agents", key) for member in allowed))
    agents: dict[str, dict[str, Any]] = {}
    for member, body in zip(allowed, bodies, strict=True):
        for entry in _entries(body, "data", {"id": str, "idle_s": int | float}):
            agent = entry["id"]
            last = agent_members.find(agent)
            if not _is_visible(holder, agent, members.by_name.get(last or "")):
                continue
            if agent not in agents or last == member.spec.name:
                agents[agent] = entry | {"member": member.spec.name}
    return {"object": "list", "data": sorted(agents.values(), key=lambda agent: agent["idle_s"])}


def _is_visible(holder: ApiKey, agent: str, last: MemberGate | None) -> bool:
    """Whether a key lists an agent that the member `last` served last.

    A key for some models sees no agent with a name whose member is unknown.
    """
    if last is None:
        return not holder.models or is_implicit(agent)
    return guards.is_for(holder, last.spec.all_names)


def _chosen(members: Members, spec: GatewaySpec, model: str) -> MemberGate:
    """Member by one of its names, as requests name it. Raises UnknownModel."""
    names = names_of(spec)
    name = names.get(model) or names.get(model.removesuffix(":latest"))
    if name is None:
        raise UnknownModel(f"model {model!r} is not served here; /v1/models lists those that are")
    return members.by_name[name]


@get("/metrics", opt=OF_ALL)
async def metrics(members: TheMembers) -> Response[bytes]:
    """Gateway metrics for Prometheus; `?model=` gives a member's own."""
    gates = members.by_name.values()
    await asyncio.gather(*(member.look() for member in gates))
    return Response(generate_latest(MemberMetrics(gates)), media_type=METRICS_TYPE)


@post(LOAD, status_code=200, opt=OF_ALL)
async def load_member(
    members: TheMembers,
    spec: TheSpec,
    data: JSONBody[dict[str, Any]],
    model: FromQuery[str | None] = None,
) -> dict[str, Any]:
    """Load the member that the query's or body's `model` names.

    Raises Unsupported for any other change, and what keeps the member from its start.
    """
    member_name = model or data.get("model")
    name = None
    if isinstance(member_name, str):
        name = names_of(spec).get(member_name)
    if name is None or data.keys() - {"model"}:
        raise Unsupported(FIXED)
    member = members.by_name[name]
    member.notice_end()
    await member.enter()
    member.leave()
    return {"model": name, "status": {"value": member.phase.value}}


@post("/v1/models/unload", opt=OF_ALL)
async def unload_members() -> None:
    """Refuse: the gateway unloads its members as memory requires."""
    raise Unsupported(FIXED)


class MemberMetrics(Collector):
    """Collector of the metrics of all members, by attribute."""

    def __init__(self, members: Iterable[MemberGate]) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """Every family, with a sample for each member."""
        kinds: Any = ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES))
        for kind, table in kinds:
            for name, (text, value) in table.items():
                family = kind(f"mlxstack_gateway_{name}", text, labels=("member",))
                for member in self._members:
                    family.add_metric((member.spec.name,), value(member))
                yield family


def _member_of(members: Members, name: str) -> MemberGate:
    """Member by one of its names. Raises UnknownModel."""
    member_name = name.removeprefix("/")
    for member in members.by_name.values():
        if member_name in member.spec.names:
            return member
    raise UnknownModel(f"model {member_name!r} is not served here; /v1/models lists those that are")


async def _gathered(
    members: Iterable[MemberGate],
    path: str,
    key: str,
    unloaded: Callable[[GatewayMember], Any] | None,
) -> list[Any]:
    """Merge the members' lists; unloaded ones give their `known` entry."""
    gates = list(members)
    entries: list[Any] = []
    bodies = await asyncio.gather(*(_read(gate, path) for gate in gates))
    for gate, body in zip(gates, bodies, strict=True):
        if body is not None:
            entries += _entries(body, key, {})
        elif unloaded is not None:
            entries.append(unloaded(gate.spec))
    return entries


def _tag(member: GatewayMember) -> OllamaModel:
    """Entry of /api/tags of a member that does not run."""
    name = member.names[0]
    model = member.model
    families = (model.architecture,) if model.architecture else ()
    details = OllamaDetails(
        parent_model="",
        format="safetensors",
        family=model.architecture,
        families=families,
        parameter_size="",
        quantization_level=model.quantization,
    )
    return OllamaModel(name, name, model.n_bytes, "", details, rfc3339(0))


def _lm_studio_model(member: GatewayMember) -> dict[str, Any]:
    """Entry of /api/v0/models of a member that does not run."""
    model = member.model
    return {
        "id": member.names[0],
        "object": "model",
        "type": "llm" if model.kind is ServiceKind.CHAT else "embeddings",
        "publisher": "local",
        "arch": model.architecture,
        "compatibility_type": "mlx",
        "quantization": model.quantization,
        "state": "not-loaded",
        "max_context_length": model.n_ctx_train or member.service.n_ctx,
        "capabilities": ["tool_use"] if "tools" in model.capabilities else [],
    }


def _listed_model(member: GatewayMember) -> LMStudioListedModel:
    """Entry of /api/v1/models of a member that does not run."""
    model = member.model
    name = member.names[0]
    is_chat = model.kind is ServiceKind.CHAT
    capabilities = Capabilities("vision" in model.capabilities, "tools" in model.capabilities)
    return LMStudioListedModel(
        type="llm" if is_chat else "embedding",
        publisher="local",
        key=name,
        display_name=name,
        architecture=model.architecture if is_chat else UNSET,
        quantization=quantization(model.quantization),
        size_bytes=model.n_bytes,
        params_string=None,
        loaded_instances=(),
        max_context_length=model.n_ctx_train or member.service.n_ctx,
        capabilities=capabilities if is_chat else UNSET,
        description=None if is_chat else UNSET,
    )


async def model_card(member: MemberGate, spec: GatewaySpec) -> dict[str, Any]:
    """Entry of a running member, else as known before its start."""
    body, phase = await asyncio.gather(_read(member, "/v1/models"), member.look())
    name, *aliases = member.spec.names
    basics = {"id": name, "object": "model", "owned_by": "mlx-stack", "type": "model"}
    since = {"created": STARTED, "created_at": rfc3339(STARTED), "display_name": name}
    cards = _entries(body, "data", {"id": str})
    own: dict[str, Any] = next((card for card in cards if card["id"] == name), {})
    n_ctx = member.spec.service.n_ctx
    accepts_images = "vision" in member.spec.model.capabilities
    return {
        **dict.fromkeys(CONTEXTS, n_ctx),
        **since,
        "features": member.spec.model.capabilities,
        "input_modalities": ["text", "image"] if accepts_images else ["text"],
        **basics,
        **own,
        "aliases": aliases,
        "status": {"value": phase.value},
        "resident": member.spec.residency.value,
        "n_bytes": member.spec.n_bytes,
        "fits": member.spec.n_bytes <= spec.budget,
        "n_requests": member.n_requests,
        "n_active": member.n_active,
        "n_waiting": member.n_waiting,
        "idle_s": member.idle_s,
    }


async def _read(member: MemberGate, path: str, key: str | None = None) -> dict[str, Any] | None:
    """JSON of a running member; None without a response."""
    if not member.is_running:
        return None
    try:
        answer = await member.process.call("GET", path, key=key)
    except httpx.HTTPError:
        return None
    if answer.status_code == 200:
        return object_of(answer)
    return None


def _entries(
    body: dict[str, Any] | None, key: str, needed: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Objects of a list in a member's answer.

    Those without the `needed` fields in their types are left out.
    """
    listed = (body or {}).get(key)
    if not isinstance(listed, list):
        return []
    return [
        entry
        for entry in listed
        if isinstance(entry, dict)
        and all(isinstance(entry.get(name), kind) for name, kind in needed.items())
    ]


ROUTES: list[Any] = [
    root, probe, health, list_models, get_model, version, list_tags, list_processes,
    list_lm_studio_models, get_lm_studio_model, list_lm_studio_v1_models, list_agents, metrics,
    load_member, unload_members, *PAGE_ROUTES,
]  # fmt: skip
EXACT = frozenset(path for route in ROUTES for path in route.paths if "{" not in path) - {AGENTS}
PREFIXES = ("/v1/models/", "/models/", "/api/v0/models/", "/static/")


def is_own(method: str, path: str) -> bool:
    """Whether the gateway answers a request itself."""
    if method == "OPTIONS":
        return True
    return path in EXACT or path.startswith(PREFIXES) or (path == AGENTS and method == "GET")


def own_app(spec: GatewaySpec, members: Members, agent_members: AgentMembers) -> Litestar:
    """Application of the gateway's own routes, with the guards of a service."""
    return Litestar(
        route_handlers=ROUTES,
        dependencies={
            "members": Provide(lambda: members, sync_to_thread=False),
            "spec": Provide(lambda: spec, sync_to_thread=False),
            "agent_members": Provide(lambda: agent_members, sync_to_thread=False),
        },
        guards=[host_guard(spec.server), guards.key_guard(spec.server)],
        exception_handlers={Exception: _answer},
        before_send=[guards.name_response],
        request_max_body_size=spec.server.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )


def _answer(request: Request[Any, Any, Any], problem: Exception) -> Response[Any]:
    path = request.scope["path"]
    error = errors.to_stack_error(problem, request.method, path)
    return dialect_of(path).error_response(error, guards.request_id(request.scope))
