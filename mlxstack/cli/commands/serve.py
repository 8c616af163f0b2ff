"""The worker: what the supervisor starts, not a person."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mlxstack.cli.exit_codes import Exit
from mlxstack.core.errors import SetupError


def serve(
    preset: Annotated[Path, typer.Argument(help="The resolved preset, as `up` wrote it.")],
) -> None:
    """Serve one resolved preset in the foreground."""
    import logging

    from mlxstack.host.descriptors import kept_limit
    from mlxstack.host.home import home_from
    from mlxstack.host.parent_watchdog import follow_supervisor
    from mlxstack.host.presets import read_resolved

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level="INFO")
    logging.getLogger("httpx").setLevel("WARNING")
    follow_supervisor(os.environ)
    try:
        resolved = read_resolved(preset)
        with kept_limit():
            from mlxstack.api.server import run

        code = run(resolved, home_from(os.environ).root, preset)
    except SetupError as why:
        typer.echo(f"error: {why}", err=True)
        raise typer.Exit(Exit.HOPELESS) from why
    raise typer.Exit(code)
