"""`tui`: the dashboard, or the same as plain text."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import is_interactive
from mlxstack.cli.service_request import Url
from mlxstack.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxstack.cli.target import ServiceTarget
    from mlxstack.cli.tui_runner import Setting

Key = Annotated[
    str | None,
    typer.Option("--key", help="Its API key; better in MLX_STACK_API_KEY, where ps cannot see it."),
]
Name = Annotated[str | None, typer.Option("--name", help="The service, when several run.")]
Service = Annotated[str | None, typer.Argument(help="The service, when several run.")]
Record = Annotated[Path | None, typer.Option("--record", help="Write what is seen to a recording.")]
Replay = Annotated[
    Path | None, typer.Option("--replay", help="Show a recording, not a service.", exists=True)
]
Speed = Annotated[float, typer.Option("--speed", help="How many times as fast to replay.", min=0.1)]
Web = Annotated[
    bool, typer.Option("--web", help="Serve it as a page for browsers on this computer.")
]
Port = Annotated[
    int, typer.Option("--port", help="Port of --web; 0 picks a free one.", min=0, max=65535)
]
WEB_PORT = 7110


def tui(  # noqa: PLR0913, PLR0917 - each is an option that a person types
    service: Service = None,
    url: Url = None,
    key: Key = None,
    name: Name = None,
    record: Record = None,
    replay: Replay = None,
    speed: Speed = 1.0,
    web: Web = False,
    port: Port = WEB_PORT,
) -> None:
    """Watch a running service: slots, queue, cache, agents, requests. Leaving does not touch it."""
    from mlxstack.cli.target import one_name

    name = one_name(service, name)
    if web:
        if record is not None:
            raise Misuse("--web keeps no recording; use --record without it")
        options = {"--url": url, "--name": name, "--replay": replay and replay.resolve()}
        arguments = [
            text for option, value in options.items() if value for text in (option, str(value))
        ]
        _serve(
            [*arguments, "--speed", str(speed)], None if replay else _target(url, key, name), port
        )
        return
    import asyncio

    from msgspec.structs import replace

    from mlxstack.cli.local_machine import here
    from mlxstack.cli.tui_runner import Setting, attach
    from mlxstack.host.home import home_from
    from mlxstack.tui import settings

    # Textual draws on stderr, except where textual-serve chose another driver.
    if "TEXTUAL_DRIVER" not in os.environ and not is_interactive():
        raise SetupError(
            "the dashboard needs a terminal; `mlx-stack status --watch` prints the same as text"
        )
    home = home_from(os.environ)
    own = settings.read_settings(home.root / settings.FILE)
    look = settings.theme_choice(own, home.root / "tui.json")
    setting = Setting(look, None, settings.keymap(own))
    if replay is not None:
        code = _play(replay, speed, setting)
    else:
        where = _target(url, key, name)
        machine = None
        if where.name is not None:
            machine = here(home, where.name)
        code = asyncio.run(attach(where, record, replace(setting, machine=machine)))
    raise typer.Exit(code)


def _serve(options: "Sequence[str]", where: "ServiceTarget | None", port: int) -> None:
    """Serve the page; the dashboards find the key in their environment."""
    from mlxstack.host.installer import install_command
    from mlxstack.host.services import KEY_VARIABLE

    try:
        from mlxstack.cli import web_dashboard
    except ModuleNotFoundError as error:
        raise SetupError(
            f"--web needs {error.name}, which is not installed; in the clone, run "
            f"`{install_command('web')}`"
        ) from error
    api_key = None
    if where is not None:
        api_key = where.api_key
    if api_key is not None:
        os.environ[KEY_VARIABLE] = api_key
    web_dashboard.serve(options, port, api_key)


def watch(url: str | None, key: str | None, name: str | None, every_s: float) -> None:
    """Print the dashboard as a text page every `every_s` seconds, until Ctrl-C."""
    import asyncio

    from mlxstack.cli.tui_runner import print_pages

    asyncio.run(print_pages(_target(url, key, name), every_s))


def _target(url: str | None, key: str | None, name: str | None) -> "ServiceTarget":
    from msgspec.structs import replace

    from mlxstack.cli.gateway_member import start_member
    from mlxstack.cli.target import key_of, target
    from mlxstack.host.home import home_from

    where = target(home_from(os.environ), name, url)
    where = replace(where, api_key=key_of(key, "--key") or where.api_key)
    start_member(where)
    return where


def _play(path: Path, speed: float, setting: "Setting") -> int:
    from mlxstack.tui.app import Dashboard
    from mlxstack.tui.recording import RecordingFeed, ended, read_recording

    feed = RecordingFeed(path.name, ended(read_recording(path)), speed)
    app = Dashboard(feed, None, setting.look, keymap=setting.keymap)
    app.run()
    return app.return_code or 0
