"""`verify`: checks all KV paths on real weights, in minutes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.exit_codes import failed_if
from mlxstack.cli.output import note, say, table
from mlxstack.cli.units import seconds_of
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from mlxstack.cli.verification.identity import VerifyReport
    from mlxstack.cli.verification.soak import SoakReport

Wanted = Annotated[
    str, preset_argument("What to verify; its weights are downloaded first.", "PRESET|MODEL")
]


def verify(
    wanted: Wanted,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts for the curves; for a small model.")
    ] = False,
    soak: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds_of,
            help="Instead: two streams and evictions for so long, such as 15m; on a Mac, new "
            "panic reports are told at the end.",
        ),
    ] = None,
) -> VerbResult:
    """Verify a model on this machine.

    It takes a few minutes, and its report is made to be pasted into an issue. Answers after a hit,
    a fork, a restore, a restart, in a batch and with drafts are compared with the same prompt cold
    and alone; step and prefill times, the stall of decoding rows and memory are measured. An engine
    of its own runs in a temporary home. The exit code is 1 for a fault.
    """
    from mlxstack.cli.verification.identity import VerifyPlan, report
    from mlxstack.cli.verification.soak import soak as soaked
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if soak:
        found = soaked(wanted, home, os.environ, note, soak)
        return VerbResult(found, lambda: _show_soak(found), failed_if(not found.is_sound))
    plan = VerifyPlan((64, 512), 12) if quick else VerifyPlan()
    verified = report(wanted, home, os.environ, note, plan)
    return VerbResult(verified, lambda: _show(verified), failed_if(not verified.is_sound))


def _show_soak(found: "SoakReport") -> None:
    from mlxstack.core.formatting import size

    panics = "not applicable" if found.panics is None else ", ".join(found.panics) or "none"
    rows = [
        ("answers", f"{found.n_answers}, {found.n_evicted} evictions"),
        ("identity", f"{found.n_different} of {found.n_compared} differ from cold"),
        ("longest pause", f"{1000 * found.longest_pause_s:.0f} ms"),
        ("memory", f"{size(found.active_bytes)} of {size(found.planned_bytes)} planned"),
        ("KV", f"{size(found.kv_bytes)} of {size(found.kv_budget_bytes)}"),
        ("device.wired", found.wired),
        ("new panic reports", panics),
    ]
    table(("CHECK", "FOUND"), rows)
    say(f"{'Sound' if found.is_sound else 'FAULTY'}, soaked for {found.seconds:.0f} s.")


def _show(found: "VerifyReport") -> None:
    from mlxstack.bench.environment import description

    here = found.conditions
    say(f"{found.preset}: {here.model}")
    for line in description(here):
        say(line)
    say("")
    table(("", "CHECK", "FOUND"), [(c.verdict, c.subject, c.detail) for c in found.checks])
    say("")
    table(("ROWS", "STEP"), [(n, f"{ms:.1f} ms") for n, ms in found.step_ms.items()])
    say("")
    rows = [(n, f"{tps:.0f} tokens/s") for n, tps in found.prefill_tps.items()]
    table(("PROMPT", "PREFILL"), rows)
    say("")
    say(f"{'Sound' if found.is_sound else 'FAULTY'}, verified in {found.seconds:.0f} s.")
