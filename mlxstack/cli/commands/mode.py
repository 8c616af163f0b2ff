"""`mode`: named sets of presets that run together."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.exit_codes import Exit, failed_if
from mlxstack.cli.output import note, say, spinner, table
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import VerbApp, VerbResult

if TYPE_CHECKING:
    from mlxstack.host.home import Home

app = VerbApp(help="Named sets of presets that run together. Without a verb: the list.")


CHANGES = {"stop": "stopped", "start": "started", "keep": "kept", "on_demand": "on demand"}
"""Services of a switch by their fields of ModeChange, in words."""


def mode_names() -> list[str]:
    """All modes, which a shell completes."""
    from mlxstack.config.modes import listed

    return sorted(listed(_home()))


Name = Annotated[str, typer.Argument(help="The mode.", autocompletion=mode_names)]


@app.without_verb
@app.command("list")
def list_modes() -> VerbResult:
    """List the modes and their members."""
    from mlxstack.config import modes
    from mlxstack.core.errors import SetupError

    home = _home()
    loaded = {}
    for name in sorted(modes.listed(home)):
        try:
            loaded[name] = modes.load(name, home)
        except SetupError as error:
            note(f"warning: {error.message}")
    rows = [
        (name, ", ".join(member.preset for member in mode.members), mode.description)
        for name, mode in loaded.items()
    ]
    return VerbResult({"modes": loaded}, lambda: table(("MODE", "MEMBERS", "WHEN TO USE"), rows))


@app.command("status")
def show_status() -> VerbResult:
    """Show the mode that runs, its address and its members.

    The exit code is 0 when the address answers and no member has failed.
    """
    from mlxstack.config import modes
    from mlxstack.control.probe import survey
    from mlxstack.gateway.spec import GatewaySpec
    from mlxstack.host.services import read_json

    home = _home()
    active = modes.active(home)
    if active is None:
        text = "no mode; mlx-stack mode switch NAME starts one"
        return VerbResult({"mode": None, "members": {}}, text, Exit.NOT_RUNNING)
    seen = {service.name: service for service in survey(home).services}
    spec = read_json(home.gateway_file(active.name), GatewaySpec)
    names = [member.name for member in spec.members] if spec is not None else []
    states = {name: str(seen[name].state) if name in seen else "stopped" for name in names}
    front = seen.get(active.name)
    state = "stopped"
    url = ""
    if front is not None:
        state = str(front.state)
        url = front.url

    def show() -> None:
        say(f"Mode: {active.name}, {state}, {url}")
        table(("MEMBER", "STATE"), states.items())

    # A member that is stopped is started by its first request.
    is_right = state == "healthy" and set(states.values()) <= {"healthy", "stopped"}
    value = {"mode": active.name, "state": state, "url": url, "members": states}
    return VerbResult(value, show, failed_if(not is_right))


@app.command("switch")
@finishes()
def switch_mode(name: Name) -> VerbResult:
    """Run the members of a mode at one address, and stop all others.

    If a member fails, the former services are started again.
    """
    from msgspec.structs import asdict

    from mlxstack.control.mode_switch import switch

    with spinner(f"mode {name}") as advance:
        change = asdict(switch(name, _home(), advance))
    lines = [f"mode {name} runs at {change['url']}"]
    lines += [f"  {word} {', '.join(change[key])}" for key, word in CHANGES.items() if change[key]]
    return VerbResult({"mode": name, **change}, "\n".join(lines))


@app.command("create")
@finishes()
def create_mode(
    name: Annotated[str, typer.Argument(help="How it is to be called.")],
    presets: Annotated[list[str], preset_argument("Its members.")],
    when: Annotated[str, typer.Option("--when", help="When to use it.")] = "",
) -> VerbResult:
    """Write a mode of these presets; its file can be edited."""
    from mlxstack.config import modes

    path = modes.create(name, presets, when, _home())
    text = f"{path} is written; mlx-stack mode switch {name} starts it"
    return VerbResult({"mode": name, "path": str(path)}, text)


def _home() -> "Home":
    from mlxstack.host.home import home_from

    return home_from(os.environ)
