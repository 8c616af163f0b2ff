"""Own answers of the gateway: health, models, metrics. None of them wakes a member."""

import asyncio
from typing import Any

import httpx
from litestar import Litestar, Request, Response, get, head, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxstack import __version__
from mlxstack.api import errors, guards
from mlxstack.api.guards import OF_ALL, PUBLIC
from mlxstack.api.protocols import dialect_of
from mlxstack.core.errors import NotFound, Unsupported
from mlxstack.gateway.members import MemberGate, MemberPhase, Members
from mlxstack.gateway.processes import json_of
from mlxstack.gateway.spec import GatewaySpec

METRICS_TYPE = "text/plain; version=0.0.4"

TheMembers = NamedDependency[Members]
TheSpec = NamedDependency[GatewaySpec]


@get("/", opt=PUBLIC)
async def root() -> dict[str, str]:
    """Name, version and status of the gateway."""
    return {"name": "mlx-stack", "version": __version__, "status": "ok"}


@head(["/", "/api/hello", "/api/tags", "/api/version"], opt=PUBLIC)
async def probe() -> None:
    """Reachability probe of clients."""


@get(["/health", "/v1/health"], opt=PUBLIC)
async def health(members: TheMembers) -> dict[str, Any]:
    """200 while the gateway serves, whatever its members do."""
    phases = {name: one.phase.value for name, one in members.by_name.items()}
    return {"status": "ok", "members": phases}


@get(["/v1/models", "/models"], opt=PUBLIC)
async def list_models(members: TheMembers, spec: TheSpec) -> dict[str, Any]:
    """List every member: loaded, or to be loaded by the first request for it."""
    cards = await asyncio.gather(*(model_card(one, spec) for one in members.by_name.values()))
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
    wanted = name.removeprefix("/")
    for one in members.by_name.values():
        if wanted in one.spec.names:
            return await model_card(one, spec)
    raise NotFound(f"model {wanted!r} is not served here; /v1/models lists those that are")


@get(["/api/tags", "/api/ps", "/api/v0/models"], opt=PUBLIC)
async def gathered(request: Request[Any, Any, Any], members: TheMembers) -> dict[str, Any]:
    """Lists of the members that run, as one."""
    path = request.scope["path"]
    found = await asyncio.gather(*(_read(one, path) for one in members.by_name.values()))
    key = "data" if path == "/api/v0/models" else "models"
    entries = [entry for body in found if body for entry in body.get(key, ())]
    return {"object": "list", key: entries} if key == "data" else {key: entries}


@get("/metrics", opt=OF_ALL)
async def metrics(members: TheMembers) -> Response[bytes]:
    """Numbers of the gateway in Prometheus' format; `?model=` asks a member for its own."""
    counters = {
        "requests": ("Requests passed on", lambda one: one.n_requests),
        "loads": ("Times that the member was started or loaded", lambda one: one.n_loads),
    }
    gauges = {
        "active": ("Requests inside", lambda one: one.n_active),
        "waiting": ("Requests that wait for the member", lambda one: one.n_waiting),
        "loaded": ("1 while it is loaded", lambda one: int(one.phase is MemberPhase.LOADED)),
        "reserved_bytes": ("Bytes that it may take", lambda one: one.spec.n_bytes),
    }
    families: list[Metric] = []
    kinds: Any = ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges))
    for kind, table in kinds:
        for name, (text, value) in table.items():
            family = kind(f"mlxstack_gateway_{name}", text, labels=("member",))
            for member, one in members.by_name.items():
                family.add_metric((member,), value(one))
            families.append(family)
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return Response(generate_latest(registry), media_type=METRICS_TYPE)


@post(["/v1/models/load", "/v1/models/unload"], opt=OF_ALL)
async def change_models() -> None:
    """Refuse changes: the members of a gateway are those it was started with."""
    raise Unsupported(
        "a gateway loads and unloads its members itself; start it again with other members"
    )


class _Families(Collector):
    """Collector of metrics that were computed already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def model_card(member: MemberGate, spec: GatewaySpec) -> dict[str, Any]:
    """Entry of a member: its own where it runs, else of what is known before its start."""
    body = await _read(member, "/v1/models")
    name, *others = member.spec.names
    known = {"id": name, "object": "model", "owned_by": "mlx-stack", "type": "model"}
    own: dict[str, Any] = next(
        (card for card in (body or {}).get("data", ()) if card["id"] == name), {}
    )
    n_ctx = member.spec.service.n_ctx
    return {
        "max_input_tokens": n_ctx,
        "max_tokens": n_ctx,
        **known,
        **own,
        "aliases": others,
        "status": {"value": member.phase.value},
        "resident": member.spec.residency.value,
        "n_bytes": member.spec.n_bytes,
        "fits": member.spec.n_bytes <= spec.budget,
    }


async def _read(member: MemberGate, path: str) -> dict[str, Any] | None:
    """JSON of a member that runs; None from one that does not answer."""
    if not member.is_running:
        return None
    try:
        answer = await member.process.call("GET", path)
    except httpx.HTTPError:
        return None
    return json_of(answer) if answer.status_code == 200 else None


ROUTES: list[Any] = [
    root, probe, health, list_models, get_model, gathered, metrics, change_models,
]  # fmt: skip
EXACT = frozenset(path for route in ROUTES for path in route.paths if "{" not in path)
PREFIXES = ("/v1/models/", "/models/")


def is_own(method: str, path: str) -> bool:
    """Whether the gateway answers a request itself."""
    if method == "OPTIONS":
        return True
    return (path.rstrip("/") or "/") in EXACT or path.startswith(PREFIXES)


def own_app(spec: GatewaySpec, members: Members) -> Litestar:
    """Application of the gateway's own routes, with the guards of a service."""
    return Litestar(
        route_handlers=ROUTES,
        dependencies={
            "members": Provide(lambda: members, sync_to_thread=False),
            "spec": Provide(lambda: spec, sync_to_thread=False),
        },
        guards=[guards.host_guard(spec.server), guards.key_guard(spec.server, dialect_of)],
        exception_handlers={Exception: _answer},
        before_send=[guards.name_response],
        request_max_body_size=spec.server.max_body_bytes,
        cors_config=guards.cors(spec.server),
        openapi_config=None,
        logging_config=None,
    )


def _answer(request: Request[Any, Any, Any], problem: Exception) -> Response[Any]:
    error, dialect = errors.to_stack_error(problem), dialect_of(request.scope["path"])
    return Response(
        dialect.error_body(error, guards.request_id(request.scope)),
        status_code=dialect.status(error),
        headers=errors.headers(error),
        media_type="application/json",
    )
