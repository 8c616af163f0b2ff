"""Prints the report of `verify --tools`."""

from collections.abc import Iterator, Sequence

from mlxstack.cli.output import say, table
from mlxstack.cli.verification.tools.call_check import CallOutcome
from mlxstack.cli.verification.tools.comparison import RepairComparison
from mlxstack.cli.verification.tools.repair_agent import RepairResult
from mlxstack.cli.verification.tools.tool_report import KindResult, ToolReport
from mlxstack.core.formatting import clipped, span


def show_tools(report: ToolReport) -> None:
    """Print calls by kind, losses, repairs and comparisons."""
    say("")
    table(("CALLS", "VALID", "EXACT", "LOOPS", "LOSES BY", "NOT VALID"), map(_row, report.kinds))
    say("")
    say(
        f"{report.n_valid} of {report.n_calls} calls are valid, {report.n_exact} are exactly those "
        f"that were asked for; {report.n_loops} loops"
    )
    if report.n_left_out:
        say(f"{report.n_left_out} more requests were left out: the time was over")
    for line in _template_lines(report):
        say(line)
    if report.better is not None:
        say(
            f"{report.better.model} makes {report.better.n_valid} valid calls with the same "
            "template: the difference is the weights"
        )
    if report.repairs:
        say("")
        _show_repairs(report)
    outcome = "Sound"
    if report.losers:
        outcome = f"LOST by the {' and the '.join(report.losers)}"
    elif not report.n_calls:
        outcome = "NOT VERIFIED: no request was answered in time"
    say("")
    say(f"{outcome}, verified in {span(report.seconds)}.")


def _row(kind: KindResult) -> tuple[object, ...]:
    failures = ", ".join(
        f"{n} {outcome}" for outcome, n in kind.outcomes.items() if outcome != CallOutcome.VALID
    )
    return (
        kind.kind, f"{kind.n_valid}/{kind.n}", kind.n_exact, kind.n_loops, kind.loser, failures,
    )  # fmt: skip


def _template_lines(report: ToolReport) -> Iterator[str]:
    losses = report.template
    if not losses.by_template:
        yield "The chat template drops nothing."
        return
    for part in losses.by_template:
        remedy = "; this server writes it in another way"
        if part in losses.in_prompt:
            remedy = ", and so does the prompt of this server"
        yield f"The chat template loses {part}{remedy}."


def _show_repairs(report: ToolReport) -> None:
    columns: dict[str, Sequence[RepairResult]] = {"mlx-stack": report.repairs}
    columns |= {rival.server: rival.repairs for rival in report.against if not rival.error}
    rows = [
        (repair.name, *(_repair_text(results[index]) for results in columns.values()))
        for index, repair in enumerate(report.repairs)
    ]
    table(("REPAIR", *columns), rows)
    for server, results in columns.items():
        say(f"{server}: {repairs_text(results)}")
    for rival in report.against:
        if rival.error:
            say(f"{rival.server}: no repairs: {rival.error}")
        _show_differences(rival)


def repairs_text(results: Sequence[RepairResult]) -> str:
    """Solved repairs, turns and tokens in a line."""
    n_solved = sum(result.is_solved for result in results)
    n_turns = sum(result.n_turns for result in results)
    n_prompt = sum(result.n_prompt for result in results)
    n_generated = sum(result.n_generated for result in results)
    return (
        f"{n_solved} of {len(results)} solved in {n_turns} turns, {n_prompt:,} prompt tokens and "
        f"{n_generated:,} generated"
    )


def _repair_text(result: RepairResult) -> str:
    outcome = "solved" if result.is_solved else "not solved"
    if not result.is_complete:
        outcome = "no time left"
    return f"{outcome}, {result.n_turns} turns"


def _show_differences(rival: RepairComparison) -> None:
    for difference in rival.differences:
        say(f"{difference.repair}, answer {difference.number}: {difference.reason}")
        say(f"  ours:   {clipped(difference.ours, 160)}")
        say(f"  theirs: {clipped(difference.theirs, 160)}")
