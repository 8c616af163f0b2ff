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
    """Service behind a gateway.

    `names` are those by which requests choose it, the first one its model's; `n_bytes` is what it
    may take of the budget when it is loaded. The process of one that `stops` ends with its model.
    """

    names: tuple[str, ...]
    service: ServiceSpec
    n_bytes: int = 0
    residency: Residency = Residency.AUTO
    startup_timeout_s: float = 240.0
    model: ModelSummary = ModelSummary()
    stops: bool = False

    @property
    def name(self) -> str:
        """Name of the service."""
        return self.service.name

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of model and service, by which API keys allow it."""
        return (*self.names, self.name)


class GatewaySpec(Struct, frozen=True):
    """Spec of a gateway; `secret` derives the keys for its members.

    Of `budget` bytes the loaded members together may take; one stays for `linger_s` at least.
    Members that are `handed_over` go on when the gateway ends, for another one. The members of one
    `of_disk` are the models that were on this disk at its start.
    """

    name: str
    server: ServerSpec
    secret: str
    members: tuple[GatewayMember, ...]
    default: str
    budget: int
    linger_s: float = LINGER_S
    handed_over: tuple[str, ...] = ()
    of_disk: bool = False


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
