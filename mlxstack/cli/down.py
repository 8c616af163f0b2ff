"""`down`: the end of a service, gently, and by force when it must be."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.show import as_json, note
from mlxstack.cli.up import Json

if TYPE_CHECKING:
    from mlxstack.host.paths import Home

ENDS = {
    "stopped": "is stopped",
    "killed": "is stopped",
    "crashed": "had crashed; what it left is cleared",
}


def down(
    names: Annotated[
        list[str] | None, typer.Argument(help="The services; all that run, if left out.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to drain before it is killed.")
    ] = None,
    json: Json = False,
) -> None:
    """Stop services: running requests may finish, then the process ends."""
    from mlxstack.cli.target import known_service
    from mlxstack.host import services
    from mlxstack.host.paths import home_from

    home = home_from(os.environ)
    if not names:
        names = [name for name in services.names(home) if home.pid_file(name).exists()]
        if not (names or json):
            typer.echo("nothing is running")
    for name in names:
        known_service(home, name)
    ends = {}
    for name in names:
        ends[name] = _stop(home, name, timeout)
        if not json:
            typer.echo(f"{name} {ENDS[ends[name]]}")
    if json:
        as_json({"services": [{"name": name, "end": end} for name, end in ends.items()]})


def _stop(home: "Home", name: str, timeout: float | None) -> str:
    """How it ended: one of ENDS. Raises Unreachable when it does not run."""
    from mlxstack.cli.target import known_service
    from mlxstack.client import Unreachable
    from mlxstack.host import services
    from mlxstack.host.state import Phase, owner

    state = owner(home, name)
    if state is None:
        left = services.sweep(home, name)
        last = known_service(home, name)
        services.mark_stopped(home, last)
        if left is None and last.phase is Phase.STOPPED:
            raise Unreachable(f"`{name}` is not running")
        return "crashed"
    patience = timeout if timeout is not None else state.plan.patience.grace_s + 1.0
    if services.stop(home, state, patience):
        note(f"{name} did not stop within {patience:g} s and was killed")
        return "killed"
    return "stopped"
