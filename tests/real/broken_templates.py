"""Whole runs of `verify --tools` with damaged templates of a model.

`python -m tests.real.broken_templates FOLDER --calls 2` verifies the model of a folder, then copies
of it with one damage of `tests.text.damaged_templates` each, whose weights are links: `--calls`
requests of each kind, short ones as by `--quick`. A damage is named if the report has the lost part
and names the template as a loser; the whole template must lose nothing. `--template NAME` runs that
one only: `whole`, or the part that a damage loses.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxstack.cli.verification.tools.tool_report import ToolReport
from mlxstack.cli.verification.tools.tool_run import ToolPlan, tool_report
from mlxstack.host.home import Home
from tests.real.company import say
from tests.text.damaged_templates import DAMAGES, Damage

TEMPLATE = "chat_template.jinja"
WHOLE = "whole"
"""Name of the template as it was published."""


@contextmanager
def damaged_copy(folder: Path, damage: Damage) -> Iterator[Path]:
    """Folder of the model with a damaged template."""
    with tempfile.TemporaryDirectory(prefix=f"{damage.lost.name.lower()}-") as copy:
        for path in folder.iterdir():
            if path.name != TEMPLATE:
                Path(copy, path.name).symlink_to(path.resolve())
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
        Path(copy, TEMPLATE).write_text(damage.of(template), encoding="utf-8")
        yield Path(copy)


def verified(folder: Path, plan: ToolPlan) -> ToolReport:
    """Report of a run in a home of its own."""
    with tempfile.TemporaryDirectory() as home:
        return tool_report(str(folder), Home(Path(home)), os.environ, say, _no_progress, plan)


def _no_progress(title: str, n_done: int, n: int) -> None:
    del title, n_done, n


def line(name: str, report: ToolReport) -> str:
    """Calls, lost parts and losers of a run."""
    kinds = [f"{kind.kind}: {kind.loser}" for kind in report.kinds if kind.loser]
    lost = ", ".join(part.name.lower() for part in report.template.by_template) or "nothing"
    losers = ", ".join([*report.losers, *kinds]) or "none"
    return (
        f"{name}: {report.n_valid} of {report.n_calls} valid in {report.seconds:.0f} of "
        f"{report.limit_s:.0f} s; lost: {lost}; losers: {losers}"
    )


def main() -> None:
    """Verify the model with each chosen template; print whether it is named."""
    damages = {damage.lost.name.lower(): damage for damage in DAMAGES}
    parser = argparse.ArgumentParser(description="verify --tools with damaged templates")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calls", type=int, default=10, help="requests of each of ten kinds")
    parser.add_argument(
        "--template", action="append", choices=[WHOLE, *damages], help="that one only; repeatable"
    )
    chosen = parser.parse_args()
    plan = ToolPlan(is_quick=True, n_of_kind=chosen.calls)
    is_sound = True
    for name in chosen.template or [WHOLE, *damages]:
        if name == WHOLE:
            report = verified(chosen.folder, plan)
            is_as_expected = not report.template.by_template
        else:
            with damaged_copy(chosen.folder, damages[name]) as copy:
                report = verified(copy, plan)
            is_named = damages[name].lost in report.template.by_template
            is_as_expected = is_named and "template" in report.losers
        say(line(name, report))
        is_sound = is_sound and is_as_expected
    sys.exit(not is_sound)


if __name__ == "__main__":
    main()
