"""`doctor`: problems of this machine and their remedies."""

import os

import typer

from mlxstack.cli.commands.up import Json
from mlxstack.cli.exit_codes import Exit
from mlxstack.cli.output import as_json, table


def doctor(json: Json = False) -> None:
    """Check the machine and the home.

    The exit code is 1 when something must be repaired.
    """
    from mlxstack.cli.doctor import CheckLevel, examine
    from mlxstack.host.home import home_from

    found = examine(home_from(os.environ), os.environ)
    if json:
        as_json({"findings": found})
    else:
        rows = [(one.verdict, one.subject, one.detail, one.remedy) for one in found]
        table(("", "CHECK", "FOUND", "REMEDY"), rows)
    if any(one.verdict is CheckLevel.BAD for one in found):
        raise typer.Exit(Exit.FAILED)
