"""`serve`: worker of the supervisor; `serve MODEL`: `up` in the foreground."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mlxstack.cli.exit_codes import Exit
from mlxstack.core.errors import SetupError

RESOLVED = ".json"
"""The ending of the file that `up` wrote for its worker."""


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What to serve.")],
) -> None:
    """Serve in the foreground, with the options of `up`."""
    preset = Path(model)
    if preset.suffix != RESOLVED:
        _run_up([model, "--foreground", *context.args])
    else:
        _work(preset)


def _run_up(arguments: list[str]) -> None:
    """Run `up` with these arguments, as typed."""
    from mlxstack.cli.commands.up import up
    from mlxstack.cli.verbs import VerbApp

    command = VerbApp()
    command.command()(up)
    typer.main.get_command(command)(arguments, standalone_mode=False)


def _work(preset: Path) -> None:
    from mlxstack.config.presets import read_resolved
    from mlxstack.host.descriptors import kept_limit
    from mlxstack.host.home import home_from
    from mlxstack.host.log_lines import log_as_json
    from mlxstack.host.parent_watchdog import follow_supervisor

    log_as_json()
    follow_supervisor(os.environ)
    try:
        resolved = read_resolved(preset)
        with kept_limit():
            from mlxstack.api.server import run

        code = run(resolved, home_from(os.environ).root, preset)
    except SetupError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(Exit.HOPELESS) from error
    raise typer.Exit(code)
