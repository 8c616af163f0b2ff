"""Spec of a gateway: its address, its members, their memory."""

import hashlib
import hmac

from msgspec import Struct

from mlxstack.api.api_keys import as_key, digest_of
from mlxstack.core.preset import ApiKey, Preset, Residency, ServerSpec, ServiceKind
from mlxstack.host.home import Home
from mlxstack.host.services import ServiceSpec, read_json

LINGER_S = 10.0


class ModelSummary(Struct, frozen=True):
    """Facts of a model before its first start; empty if unknown."""

    kind: ServiceKind = ServiceKind.CHAT
    architecture: str = ""
    quantization: str = ""
    n_bytes: int = 0
    n_ctx_train: int = 0
    capabilities: tuple[str, ...] = ()


class GatewayMember(Struct, frozen=True):
    """Service behind a gateway."""

    names: tuple[str, ...]
    """Names by which requests choose it, the first one its model's."""
    service: ServiceSpec
    n_bytes: int = 0
    """Bytes of the budget that it may take when it is loaded."""
    residency: Residency = Residency.AUTO
    startup_timeout_s: float = 240.0
    model: ModelSummary = ModelSummary()
    stops: bool = False
    """Whether its process ends when its model is unloaded."""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of model and service, by which API keys allow it."""
        return (*self.names, self.name)


class GatewaySpec(Struct, frozen=True):
    """Spec of a gateway for its worker."""

    name: str
    server: ServerSpec
    secret: str
    """Derives the keys for its members."""
    members: tuple[GatewayMember, ...]
    default: str
    """Name of the member for requests without a model."""
    budget: int
    """Bytes that the loaded members together may take."""
    linger_s: float = LINGER_S
    """Seconds that a loaded member stays at least."""
    handed_over: tuple[str, ...] = ()
    """Members that go on when the gateway ends, for another one."""
    of_disk: bool = False
    """Whether the members are the models that were on this disk at its start."""


def internal_key(secret: str, key: ApiKey | None) -> str:
    """Member key for the holder of `key`; None without keys."""
    holder = ""
    if key is not None:
        holder = key.key
    return hmac.new(secret.encode(), holder.encode(), hashlib.sha256).hexdigest()


def own_preset(home: Home, name: str, secret: str) -> Preset | None:
    """Preset of a member; None where another service has overwritten it."""
    preset = read_json(home.preset_file(name), Preset)
    keys = {as_key(key).key for key in preset.server.api_keys} if preset is not None else set()
    if digest_of(internal_key(secret, None)) in keys:
        return preset
    return None


def home_of(spec: GatewaySpec) -> Home:
    """Home that the members share."""
    return spec.members[0].service.home


def names_of(spec: GatewaySpec) -> dict[str, str]:
    """Members by name: services, then models, then ids; first wins."""
    members: dict[str, str] = {}
    for member in spec.members:
        members.setdefault(member.name, member.name)
    for position in range(max(len(member.names) for member in spec.members)):
        for member in spec.members:
            for name in member.names[position : position + 1]:
                members.setdefault(name, member.name)
    return members
