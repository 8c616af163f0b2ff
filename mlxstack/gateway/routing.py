"""Choice of the member that answers a request."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from mlxstack.api.asgi import Scope
from mlxstack.api.request_body import decode_body
from mlxstack.core.errors import UnknownModel
from mlxstack.gateway.agent_members import AgentMembers
from mlxstack.gateway.members import MemberGate, Members
from mlxstack.gateway.spec import GatewaySpec, names_of
from mlxstack.models.reference import HUB_ID

AGENTS = "/v1/agents/"
LATEST = ":latest"
PULL = "/api/pull"
"""It answers for every model on this machine."""


class ModelField(Struct):
    """Fields of a body that name a model."""

    model: Any = None
    name: Any = None
    """Of older Ollama clients."""


class MemberRouter:
    """Chooses the member of a request."""

    def __init__(self, spec: GatewaySpec, members: Members, agents: AgentMembers) -> None:
        self._spec = spec
        self._members = members
        self._agents = agents
        self._names = names_of(spec)
        self._is_strict = spec.server.strict_models
        if self._is_strict is None:
            self._is_strict = len(spec.members) > 1

    def choose(self, scope: Scope, body: bytes) -> MemberGate:
        """Member by model, agent, or default. Raises UnknownModel."""
        model = model_in_query(scope) or _model_in(body)
        path = scope["path"]
        if model:
            name = self._names.get(model) or self._names.get(model.removesuffix(LATEST))
            if name is not None:
                return self._members.by_name[name]
            if self._is_strict and path != PULL:
                raise UnknownModel(_unknown(model, self._names, self._spec))
        elif path.startswith(AGENTS):
            agent = path.removeprefix(AGENTS).partition("/")[0]
            return self._members.by_name[self._agents.find(agent) or self._spec.default]
        return self._members.default


def model_in_query(scope: Scope) -> str | None:
    """The query's `model`, as llama-server's router has it."""
    if b"model=" not in scope["query_string"]:
        return None
    models: list[str] = parse_qs(scope["query_string"].decode("latin-1")).get("model", [])
    return next(iter(models), None)


def _model_in(body: bytes) -> str | None:
    """The body's `model` or `name`; None without JSON."""
    try:
        fields = decode_body(body, ModelField)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    model = fields.model
    if model is None:
        model = fields.name
    if isinstance(model, str):
        return model
    return None


def _unknown(model: str, names: Mapping[str, str], spec: GatewaySpec) -> str:
    """Message for an unknown name: near names, and a remedy."""
    served = ", ".join(member.names[0] for member in spec.members)
    if not spec.of_disk:
        return f"model {model!r} is not served here; served are {served}"
    near = get_close_matches(model, names, n=1, cutoff=0.4)
    nearest = f"on this disk are {served}"
    if near:
        nearest = f"the nearest is {near[0]!r}"
    if not HUB_ID.fullmatch(model):
        return f"model {model!r} is not on this disk; {nearest}, and `mlx-stack models` lists all"
    return (
        f"model {model!r} was not on this disk at the start of the gateway; {nearest}; "
        f"`mlx-stack pull {model}` downloads it, then `mlx-stack down {spec.name}` and "
        "`mlx-stack up --any-model` serve it"
    )
