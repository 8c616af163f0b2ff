"""`down`: stop services; force ends those that do not stop in time."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import service_argument, service_option
from mlxstack.cli.output import as_json, note, say
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import Json

if TYPE_CHECKING:
    from mlxstack.host.home import Home

MAX_S = 86_400.0

ENDS = {
    "stopped": "is stopped",
    "killed": "is stopped",
    "crashed": "had crashed; what it left is cleared",
}


@finishes()
def down(
    names: Annotated[list[str] | None, service_argument("Services to stop (default: all).")] = None,
    named: Annotated[list[str] | None, service_option("Service to stop.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, max=MAX_S, help="Seconds to drain before it is killed.")
    ] = None,
    json: Json = False,
) -> None:
    """Stop services once their running requests have finished."""
    from mlxstack.client.errors import Unreachable
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    names = [*(names or ()), *(named or ())]
    chosen = _chosen(home, names)
    alive = {state.spec.name for state in services.running(home)}
    if not (chosen or json):
        say("nothing is running")
    ends = {}
    idle = []
    for name in chosen:
        # A gateway has stopped its members already.
        end = _stop(home, name, timeout) or ("stopped" if name in alive else None)
        if end is None:
            if name in names:
                idle.append(f"`{name}`")
            continue
        ends[name] = end
        if not json:
            say(f"{name} {ENDS[end]}")
    if json:
        as_json({"services": [{"name": name, "end": end} for name, end in ends.items()]})
    if idle:
        raise Unreachable(f"{', '.join(idle)} {'is' if len(idle) == 1 else 'are'} not running")


def _chosen(home: "Home", names: list[str]) -> list[str]:
    """Named services with their members, else all running ones; gateways first."""
    from mlxstack.cli.target import known_service
    from mlxstack.host import services
    from mlxstack.host.services import is_gateway

    if not names:
        running = [
            name
            for name in services.names(home)
            if home.pid_file(name).exists() and services.read_state(home, name) is not None
        ]
        return sorted(running, key=lambda name: not is_gateway(known_service(home, name).spec))
    from mlxstack.control.gateway import running_members

    full_names = [known_service(home, name).spec.name for name in names]
    with_members = (
        service for name in full_names for service in (name, *running_members(home, name))
    )
    return list(dict.fromkeys(with_members))


def _stop(home: "Home", name: str, timeout: float | None) -> str | None:
    """Stop a service: a key of ENDS, or None if not running."""
    from mlxstack.cli.target import known_service
    from mlxstack.host import services
    from mlxstack.host.services import Phase, mark_stopped, owner

    state = owner(home, name)
    if state is None:
        left = services.sweep(home, name)
        last = known_service(home, name)
        mark_stopped(home, last)
        if left is None and last.phase is Phase.STOPPED:
            return None
        return "crashed"
    patience = state.spec.stop_s if timeout is None else timeout
    if services.stop(home, state, patience):
        note(f"{name} did not stop within {patience:g} s and was killed")
        return "killed"
    return "stopped"
