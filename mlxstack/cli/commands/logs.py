"""`logs`: the log of a service."""

import os
import time
from typing import Annotated

import typer

from mlxstack.cli.completion import service_argument, service_option
from mlxstack.cli.output import say
from mlxstack.cli.verbs import Json


def logs(
    name: Annotated[str | None, service_argument("Service (default: the only one).")] = None,
    named: Annotated[str | None, service_option("Service (default: the only one).")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until Ctrl-C.")] = False,
    n_lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many lines.")] = 50,
    verbose: Annotated[bool, typer.Option("--verbose", help="Whole lines, with ids.")] = False,
    json: Json = False,
) -> None:
    """Print the last lines of a service's log.

    Requests are told in short; with --json one object per whole line.
    """
    from itertools import chain
    from json import dumps

    from mlxstack.cli.target import known_service, one_name
    from mlxstack.host import logs as files
    from mlxstack.host.home import home_from
    from mlxstack.host.log_lines import shortened

    home = home_from(os.environ)
    path = home.log_file(known_service(home, one_name(name, named)).plan.name)
    ahead = files.follow(path, lambda: time.sleep(0.2)) if follow else iter(())
    for line in chain(files.tail(path, n_lines), ahead):
        say(dumps({"line": line}) if json else line if verbose else shortened(line))
