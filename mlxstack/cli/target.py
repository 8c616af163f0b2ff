"""Target of a verb: service by name, URL, or the only one."""

import asyncio
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from mlxstack.cli.exit_codes import Misuse
from mlxstack.client.client import Client
from mlxstack.client.errors import Unreachable
from mlxstack.config.preset_reflection import suggestion
from mlxstack.host import services
from mlxstack.host.home import Home
from mlxstack.host.services import (
    KEY_VARIABLE,
    ServedAt,
    ServiceState,
    is_gateway,
    read_json,
    read_state,
    usable_key,
)

if TYPE_CHECKING:
    from mlxstack.gateway.spec import GatewaySpec


T = TypeVar("T")

Question = Callable[[Client], Awaitable[T]]

TIMEOUT_S = 600.0


class ServiceTarget(Struct, frozen=True):
    """Address, API key and name of a service; `member` of a gateway."""

    url: str
    api_key: str | None = None
    name: str | None = None
    member: str | None = None

    def ask(
        self, question: Question[T], member: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> T:
        """Answer of the service, or of a member. Raises what `Client` raises."""

        async def call() -> T:
            async with Client(self.url, self.api_key, timeout_s, member) as client:
                return await question(client)

        return asyncio.run(call())


class Membership(Struct, frozen=True):
    """A running gateway, and the name of one of its members."""

    gateway: ServiceState
    member: str


def one_name(positional: str | None, option: str | None) -> str | None:
    """Name that was given in either way. Raises Misuse for two."""
    if positional is not None and option is not None and positional != option:
        raise Misuse(f"name one service: `{positional}` or `{option}`")
    return positional or option


def known_service(home: Home, name: str | None) -> ServiceState:
    """Service of this home, running or not. Raises Unreachable."""
    names = services.names(home)
    if name is None:
        live = services.running(home)
        if live:
            return _only(live, "run")
        states = [read_state(home, name) for name in names]
        return _only([state for state in states if state is not None], "are known")
    state = read_state(home, name)
    if state is None:
        near = suggestion(name, names)
        raise Unreachable(f"no service `{name}` was ever started here{near}")
    return state


def target(home: Home, name: str | None, url: str | None) -> ServiceTarget:
    """Find a running service by `name` or `url`. Raises Unreachable, Misuse."""
    api_key = key_of(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)
    if url is not None:
        return ServiceTarget(address(url), api_key)
    live = services.running(home)
    if name is not None:
        if (owner := membership(home, name)) is not None:
            return _target_of(home, owner.gateway, api_key, owner.member)
        live = [state for state in live if state.spec.name == name]
    if name and not live:
        raise Unreachable(f"`{name}` is not running")
    return _target_of(home, _only(live, "run"), api_key, None)


def membership(home: Home, name: str) -> Membership | None:
    """Running gateway with a member of this name, model or hub id."""
    from mlxstack.gateway.spec import names_of

    for state in services.running(home):
        spec = gateway_spec(home, state)
        if spec is not None and (member := names_of(spec).get(name)) is not None:
            return Membership(state, member)
    return None


def gateway_spec(home: Home, state: ServiceState) -> "GatewaySpec | None":
    """Spec of a gateway; None of another service."""
    if not is_gateway(state.spec):
        return None
    from mlxstack.gateway.spec import GatewaySpec

    return read_json(home.gateway_file(state.spec.name), GatewaySpec)


def _target_of(
    home: Home, state: ServiceState, api_key: str | None, member: str | None
) -> ServiceTarget:
    plan = state.spec
    spec = gateway_spec(home, state)
    served = spec or read_json(home.preset_file(plan.name), ServedAt)
    key = api_key or (usable_key(served.server) if served is not None else None)
    if spec is not None:
        member = member or spec.default
    return ServiceTarget(plan.url, key, plan.name, member)


def key_of(text: str | None, giver: str) -> str | None:
    """Check a key of `giver`. Raises Misuse where headers forbid it."""
    if text and not (text.isascii() and text.isprintable()):
        raise Misuse(f"{giver} holds no key: a key has printable ASCII characters only")
    return text or None


def address(text: str) -> str:
    """URL without a final `/v1`. Raises Misuse for an invalid one."""
    url = text.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not (is_whole and parts.scheme in {"http", "https"} and url.isprintable()):
        raise Misuse(f"`{text}` is not the URL of a service; write it as http://127.0.0.1:7109")
    return url


def _line(name: str) -> str:
    """The command as it was typed, with a service's name."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return f"`{shlex.join(['mlx-stack', *arguments[:end], '--name', name, *arguments[end:]])}`"


def _only(states: list[ServiceState], verb: str) -> ServiceState:
    if not states:
        raise Unreachable("no service is running; start one with `mlx-stack up demo`")
    gateways = [state for state in states if is_gateway(state.spec)]
    if len(gateways) == 1:
        return gateways[0]
    if len(states) > 1:
        names = sorted(state.spec.name for state in states)
        raise Misuse(f"several services {verb}; name one of {', '.join(names)}: {_line(names[0])}")
    return states[0]
