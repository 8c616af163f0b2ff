"""`verify`: checks all KV paths on real weights, in minutes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.exit_codes import Misuse, failed_if
from mlxstack.cli.output import counter, note, say, table
from mlxstack.cli.tool_options import ToolOptions
from mlxstack.cli.units import seconds_of
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from mlxstack.bench.environment import Conditions
    from mlxstack.cli.verification.identity import VerifyReport
    from mlxstack.cli.verification.kernels import KernelReport
    from mlxstack.cli.verification.mac_report import MacReport
    from mlxstack.cli.verification.soak import SoakReport
    from mlxstack.host.home import Home

ModelArgument = Annotated[
    str, preset_argument("What to verify; its weights are downloaded first.", "PRESET|MODEL")
]
Kernels = Annotated[
    bool,
    typer.Option(
        "--kernels", help="Instead: MLX's kernels with the model's shapes, against the CPU."
    ),
]
Soak = Annotated[
    float | None,
    typer.Option(
        metavar="TIME",
        parser=seconds_of,
        help="Instead: two streams and evictions for so long, such as 15m; on a Mac, new reports "
        "of panics, the GPU and crashes are listed at the end. With --mac: its last part.",
    ),
]
Measure = Annotated[
    float | None,
    typer.Option(
        metavar="TIME", parser=seconds_of, help="With --mac: time to measure, 10m by default."
    ),
]
REPORT_TO = "an issue of mlx-stack"


def verify(
    model: ModelArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts and times; for a small model.")
    ] = False,
    kernels: Kernels = False,
    mac: Annotated[
        bool, typer.Option("--mac", help="All of it in one report on disk, for a new Mac.")
    ] = False,
    soak: Soak = None,
    measure: Measure = None,
    tools: ToolOptions = ToolOptions(),
) -> VerbResult:
    """Verify a model on this machine.

    It takes a few minutes, and its report is made to be pasted into an issue. Answers after a hit,
    a fork, a restore, a restart, in a batch, with drafts and in a long context are compared with
    the same prompt cold and alone; step and prefill times, the stall of decoding rows and memory
    are measured. An engine of its own runs in a temporary home. With --mac: `doctor`, --kernels,
    this, 10 minutes of measurements and --soak 15m. With --tools: calls of ten kinds; the report
    says which are valid, and whether the chat template or the weights lose the others; `presets`
    and `models` show its counts. The exit code is 1 for a fault.
    """
    from mlxstack.host.home import home_from
    from mlxstack.host.parent_watchdog import follow_supervisor

    if kernels and (mac or soak):
        raise Misuse("--kernels is a run of its own, and a part of --mac")
    if measure is not None and not mac:
        raise Misuse("--measure is the time of a part of --mac")
    tools.check(has_others=bool(kernels or mac or soak))
    follow_supervisor(os.environ)
    home = home_from(os.environ)
    if tools.tools:
        return _verify_tools(model, home, quick, tools)
    if mac:
        return _verify_mac(model, home, quick, soak, measure)
    if kernels:
        return _verify_kernels(model, home)
    if soak:
        return _verify_soak(model, home, soak)
    return _verify_identity(model, home, quick)


def _verify_mac(
    model: str, home: "Home", is_quick: bool, soak_s: float | None, measure_s: float | None
) -> VerbResult:
    from mlxstack.cli.verification.mac_run import MacPlan, mac_report

    plan = MacPlan(60.0, 60.0, is_quick=True) if is_quick else MacPlan()
    plan = MacPlan(measure_s or plan.measure_s, soak_s or plan.soak_s, is_quick)
    report = mac_report(model, home, os.environ, note, plan)
    return VerbResult(report, lambda: _show_mac(report, home), failed_if(not report.is_sound))


def _verify_kernels(model: str, home: "Home") -> VerbResult:
    from mlxstack.cli.verification.kernels import kernel_report

    report = kernel_report(model, home, os.environ, note)
    return VerbResult(report, lambda: _show_kernels(report), failed_if(not report.is_sound))


def _verify_tools(model: str, home: "Home", is_quick: bool, options: ToolOptions) -> VerbResult:
    from mlxstack.cli.verification.tools.call_tasks import N_OF_KIND
    from mlxstack.cli.verification.tools.repair_tasks import REPAIRS
    from mlxstack.cli.verification.tools.tool_run import ToolPlan, tool_report
    from mlxstack.cli.verification.tools.tool_tables import show_tools

    n_repairs = len(REPAIRS) if options.repairs else 0
    plan = ToolPlan(
        is_quick=is_quick,
        n_repairs=n_repairs,
        against=tuple(options.against or ()),
        limit_s=options.limit,
        n_of_kind=options.calls or N_OF_KIND,
    )
    with counter() as progress:
        report = tool_report(model, home, os.environ, note, progress, plan)

    def show() -> None:
        _show_conditions(report.preset, report.conditions)
        show_tools(report)

    return VerbResult(report, show, failed_if(not report.is_sound))


def _verify_soak(model: str, home: "Home", seconds: float) -> VerbResult:
    from mlxstack.cli.verification.soak import soak

    report = soak(model, home, os.environ, note, seconds)
    return VerbResult(report, lambda: _show_soak(report), failed_if(not report.is_sound))


def _verify_identity(model: str, home: "Home", is_quick: bool) -> VerbResult:
    from mlxstack.cli.verification.identity import QUICK, VerifyPlan, report

    verified = report(model, home, os.environ, note, QUICK if is_quick else VerifyPlan())
    return VerbResult(verified, lambda: _show(verified), failed_if(not verified.is_sound))


def _show_mac(report: "MacReport", home: "Home") -> None:
    from mlxstack.cli.verification.mac_run import summary

    _show_conditions(report.wanted, report.conditions)
    say("")
    table(("PART", "RESULT"), [(part.name, summary(part)) for part in report.parts])
    say("")
    say(f"{_soundness(report)}. Please send this file in {REPORT_TO}:")
    say(f"  {home.mac_report_file}")


def _show_kernels(report: "KernelReport") -> None:
    from mlxstack.cli.verification.kernels import line_of

    _show_conditions(report.preset, report.conditions)
    say("")
    for check in report.checks:
        if check.is_fault:
            say(line_of(check))
    n_faults = sum(check.is_fault for check in report.checks)
    n_unavailable = sum(check.outcome == "unavailable" for check in report.checks)
    say(f"{len(report.checks)} checks, {n_faults} faults, {n_unavailable} not run: none here")
    say(f"{_soundness(report)}, checked in {report.seconds:.0f} s.")


def _show_soak(report: "SoakReport") -> None:
    from mlxstack.core.formatting import size

    reports = "not applicable"
    if report.reports is not None:
        reports = ", ".join(map(str, report.reports)) or "none"
    rows = [
        ("answers", f"{report.n_answers}, {report.n_evicted} evictions"),
        ("identity", f"{report.n_different} of {report.n_compared} differ from cold"),
        ("longest pause", f"{1000 * report.longest_pause_s:.0f} ms"),
        ("memory", f"{size(report.active_bytes)} of {size(report.planned_bytes)} planned"),
        ("KV", f"{size(report.kv_bytes)} of {size(report.kv_budget_bytes)}"),
        ("device.wired", report.wired),
        ("new reports of macOS", reports),
        ("before", str(report.interrupted or "")),
    ]
    table(("CHECK", "FOUND"), [row for row in rows if row[1]])
    say(f"{_soundness(report)}, soaked for {report.seconds:.0f} s.")


def _show_conditions(name: str, conditions: "Conditions") -> None:
    from mlxstack.bench.environment import description

    say(f"{name}: {conditions.model}")
    for line in description(conditions):
        say(line)


def _show(report: "VerifyReport") -> None:
    _show_conditions(report.preset, report.conditions)
    say("")
    table(("", "CHECK", "FOUND"), [(c.verdict, c.subject, c.detail) for c in report.checks])
    say("")
    table(("ROWS", "STEP"), [(n, f"{ms:.1f} ms") for n, ms in report.step_ms.items()])
    say("")
    rows = [(n, f"{tps:.0f} tokens/s") for n, tps in report.prefill_tps.items()]
    table(("PROMPT", "PREFILL"), rows)
    say("")
    say(f"{_soundness(report)}, verified in {report.seconds:.0f} s.")


def _soundness(report: "MacReport | KernelReport | SoakReport | VerifyReport") -> str:
    if report.is_sound:
        return "Sound"
    return "FAULTY"
