"""`verify --mac`: all parts, each in processes of its own.

A part that MLX or macOS ends leaves the report and the other parts. Measurements of the limits of
command buffers need processes of their own anyway, since MLX reads them once.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from mlxstack.bench.environment import child_env, conditions, ended
from mlxstack.cli.verification.child import run_child
from mlxstack.cli.verification.mac_report import MacReport, PartResult, ReportFile
from mlxstack.cli.verification.probe import Say, chat_model
from mlxstack.core.formatting import span
from mlxstack.core.preset import Preset
from mlxstack.host.command_buffers import VARIABLES, mac_limits
from mlxstack.host.hardware import chip, this_memory
from mlxstack.host.home import Home
from mlxstack.host.sleep import caffeinate

MLX_LIMIT = 40
MLX_LIMIT_OF_LARGE_CHIPS = 50
"""MLX's own limit of operations and of million numbers; the latter on Max and Ultra."""
LARGE_CHIP = re.compile(r"\b(?:Max|Ultra)\b")
SHORT_SHARE = 0.15
"""Of the time to measure, for each of the two limits."""
LOAD_S = 1800.0
"""Seconds for a part beyond its own time: download and load."""
MAX_S = 4 * 3600.0
"""Seconds for a part without a time of its own."""


class MacPlan(Struct, frozen=True):
    """Seconds of measurements and soak; `is_quick` is that of `verify`."""

    measure_s: float = 600.0
    soak_s: float = 900.0
    is_quick: bool = False


class MacRun:
    """Runs the parts, and writes what they report."""

    def __init__(self, model: str, home: Home, env: Mapping[str, str], say: Say) -> None:
        self._wanted = model
        self._env = child_env(env)
        self._say = say
        self._preset = chat_model(model, home, this_memory(env)).preset
        self._conditions = conditions(self._preset.model.id, datetime.now(UTC).date(), env)
        self.file = ReportFile(home, model, self._conditions)
        if self.file.report.before:
            say(f"the last run ended without an end; its report is {self.file.report.before}")
        say(f"report: {self.file.path}")

    def run(self, plan: MacPlan) -> MacReport:
        """Run all parts; an interrupt ends the report, too."""
        quick = ["--quick"] if plan.is_quick else []
        soak = ["--soak", f"{plan.soak_s:g}s"]
        try:
            self._verb("doctor", ["doctor"], MAX_S)
            self._verb("kernels", ["verify", "--kernels", self._wanted], MAX_S)
            self._verb("verify", ["verify", self._wanted, *quick], MAX_S)
            self._measure(plan.measure_s)
            self._verb("soak", ["verify", *soak, self._wanted], LOAD_S + 2 * plan.soak_s)
        except SystemExit:  # ended by SIGTERM, which its user may not have sent
            raise
        except BaseException:
            self.file.end(ended(self._conditions))
            raise
        self.file.end(ended(self._conditions))
        return self.file.report

    def _verb(self, name: str, arguments: Sequence[str], limit_s: float) -> None:
        """Run a verb, whose JSON is the result of a part."""
        output: list[bytes] = []
        command = [sys.executable, "-m", "mlxstack.cli.main", *arguments, "--json"]
        self._part(name, [(command, self._env, b"")], limit_s, output.append, lambda: _json(output))

    def _measure(self, seconds: float) -> None:
        """Measure with MLX's own command buffers, raised ones, and as served."""
        command = [sys.executable, "-m", "mlxstack.engine.checks"]
        limit = MLX_LIMIT
        if LARGE_CHIP.search(chip()):
            limit = MLX_LIMIT_OF_LARGE_CHIPS
        own = dict.fromkeys(VARIABLES, str(limit))
        raised = mac_limits("", psutil.virtual_memory().total)
        short_s = SHORT_SHARE * seconds
        long_s = seconds - 2 * short_s
        results: list[Any] = []
        children = [
            (command, {**self._env, **own}, _task(self._preset, short_s, is_short=True)),
            (command, {**self._env, **raised}, _task(self._preset, short_s, is_short=True)),
            (command, self._env, _task(self._preset, long_s, is_short=False)),
        ]

        def keep(line: bytes) -> None:
            measurement = msgspec.json.decode(line)
            self._say(_measurement_text(measurement))
            results.append(measurement)
            self.file.put(PartResult("measurements", result=results))

        self._part("measurements", children, LOAD_S + 2 * seconds, keep, lambda: results)

    def _part(
        self,
        name: str,
        children: Sequence[tuple[Sequence[str], Mapping[str, str], bytes]],
        limit_s: float,
        on_line: Callable[[bytes], None],
        result: Callable[[], Any],
    ) -> None:
        """Run the children of a part, and write its result."""
        self._say(f"-- {name}")
        self.file.put(PartResult(name))
        began = time.monotonic()
        ends = [
            run_child(command, env, limit_s, self._say, on_line, question)
            for command, env, question in children
        ]
        worst = next((end for end in ends if end.exit_code), ends[-1])
        part = PartResult(
            name=name,
            seconds=time.monotonic() - began,
            exit_code=worst.exit_code,
            result=result(),
            last_lines=worst.last_lines if worst.exit_code else (),
        )
        self.file.put(part)


def mac_report(
    model: str, home: Home, env: Mapping[str, str], say: Say, plan: MacPlan
) -> MacReport:
    """Verify, measure and soak a preset or a model. Raises SetupError."""
    run = MacRun(model, home, env, say)
    command = caffeinate()
    if command is not None:
        # It ends with this process.
        with suppress(OSError):
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return run.run(plan)


def summary(part: PartResult) -> str:
    """Result of a part in a few words."""
    if part.exit_code is None:
        return "not ended"
    if part.exit_code < 0:
        return f"ended by signal {-part.exit_code}"
    result = part.result
    if part.name == "measurements":
        n_left_out = sum(bool(row["left_out"]) for row in result or ())
        counts = f"{len(result or ())} results, {n_left_out} left out"
        return counts if part.exit_code == 0 else f"{counts}, exit code {part.exit_code}"
    if not isinstance(result, dict):
        return f"exit code {part.exit_code}"
    if part.name == "doctor":
        levels = [finding["verdict"] for finding in result["findings"]]
        return f"{levels.count('bad')} bad, {levels.count('warn')} warnings"
    checks = ""
    if "checks" in result:
        checks = f"{len(result['checks'])} checks, "
    return f"{checks}{'sound' if result['is_sound'] else 'FAULTY'}, {span(result['seconds'])}"


def _task(preset: Preset, seconds: float, *, is_short: bool) -> bytes:
    """Task for `engine.checks.__main__`, whose import would load MLX."""
    return msgspec.json.encode(
        {"model": preset.model, "kv": preset.kv, "seconds": seconds, "is_short": is_short}
    )


def _json(lines: Sequence[bytes]) -> Any:
    """JSON of a verb; None where an error ended it."""
    try:
        return msgspec.json.decode(b"".join(lines))
    except msgspec.DecodeError:
        return None


def _measurement_text(measurement: dict[str, Any]) -> str:
    figures = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in measurement["figures"].items()
    ]
    return f"{measurement['name']}: {', '.join([*figures, measurement['left_out']]).rstrip(', ')}"
