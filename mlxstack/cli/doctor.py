"""`doctor`: what is right and wrong with this machine, and what to do."""

import os

import typer

from mlxstack.cli.exits import Exit
from mlxstack.cli.show import as_json, table
from mlxstack.cli.up import Json


def doctor(json: Json = False) -> None:
    """Check the machine and the home; the exit code is 1 when something must be repaired."""
    from mlxstack.cli.finding import CheckLevel
    from mlxstack.cli.findings import examine
    from mlxstack.host.paths import home_from

    found = examine(home_from(os.environ), os.environ)
    if json:
        as_json({"findings": found})
    else:
        rows = [(one.verdict, one.subject, one.detail, one.remedy) for one in found]
        table(("", "WHAT", "FOUND", "WHAT TO DO"), rows)
    if any(one.verdict is CheckLevel.BAD for one in found):
        raise typer.Exit(Exit.FAILED)
