"""`logs`: the log of a service."""

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.completion import service_argument, service_option
from mlxstack.cli.output import say
from mlxstack.cli.verbs import Json

if TYPE_CHECKING:
    from mlxstack.host.home import Home

LABELS_S = 2.0
"""Seconds that the names of agents may take."""


def logs(
    name: Annotated[str | None, service_argument("Service (default: the only one).")] = None,
    named: Annotated[str | None, service_option("Service (default: the only one).")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until Ctrl-C.")] = False,
    n_lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many lines.")] = 50,
    verbose: Annotated[bool, typer.Option("--verbose", help="Whole lines, with ids.")] = False,
    json: Json = False,
) -> None:
    """Print the last lines of a service's log.

    With --json each line is an object: time, level, source, message, and fields such as those of
    a request.
    """
    from itertools import chain

    from mlxstack.cli.target import known_service, one_name
    from mlxstack.host import log_lines
    from mlxstack.host import logs as files
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    state = known_service(home, one_name(name, named))
    path = home.log_file(state.spec.name)
    ahead = files.follow(path, lambda: time.sleep(0.2)) if follow else iter(())
    names = {} if json or verbose else _labels(home, state.spec.name)
    for text in chain(files.tail(path, n_lines), ahead):
        line = log_lines.with_name(log_lines.read(text), names)
        say(log_lines.text_of(line) if json else log_lines.for_people(line, is_whole=verbose))


def _labels(home: "Home", name: str) -> dict[str, str]:
    """Labels of agents by ids; none where the service does not answer."""
    from mlxstack.cli.agent_names import labels_of
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.cli.target import target
    from mlxstack.core.errors import StackError

    try:
        agents = target(home, name, None).ask(
            lambda client: client.get("/v1/agents", dict[str, Any]), timeout_s=LABELS_S
        )
    except (StackError, ConnectionError, Misuse):
        return {}
    return labels_of(agents["data"])
