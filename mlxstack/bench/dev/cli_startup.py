"""`bench dev start`: start time of the command, against bare Python."""

import subprocess
import sys
import time
from collections.abc import Sequence

from msgspec import Struct

from mlxstack.bench.report import ReportTable, Results, at_most
from mlxstack.bench.servers import Sandbox
from mlxstack.bench.statistics import lasting, ratio, spread, times
from mlxstack.core.errors import Broken

COMMAND = ("-m", "mlxstack.cli.main")
IDLE = "python -c pass"
HELP = "mlx-stack --help"
CONTESTANTS = {
    IDLE: ("-c", "pass"),
    HELP: (*COMMAND, "--help"),
    "mlx-stack presets": (*COMMAND, "presets"),
    "mlx-stack status": (*COMMAND, "status", "--json"),
}
MAX_RATIO = 10.0


class StartPlan(Struct, frozen=True):
    """Start benchmark: all contestants by turns, `rounds` times."""

    rounds: int = 15


SMALL = StartPlan(1)


def run(stage: Sandbox, plan: StartPlan) -> Results:
    """Start each contestant again and again. Raises Broken when one fails."""
    stage.say("starting the command")
    env = {**stage.env, "MLX_STACK_HOME": str(stage.folder / "home")}
    taken: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(plan.rounds + 1):
        for name, words in CONTESTANTS.items():
            taken[name].append(_seconds(words, env))
    # The first round only brings the files into memory.
    seconds = {name: tuple(values[1:]) for name, values in taken.items()}
    idle = spread(seconds[IDLE]).median
    shares = {name: ratio(spread(values).median, idle) for name, values in seconds.items()}
    rows = tuple(
        (name, lasting(seconds[name]), times(shares[name]), f"{_modules(words, env):,}")
        for name, words in CONTESTANTS.items()
    )
    return Results(
        (ReportTable("Starting the command", ("Command", "Wall time", "Ratio", "Modules"), rows),),
        (at_most(f"{HELP}, against {IDLE}", shares[HELP], MAX_RATIO),),
        seconds,
    )


def _seconds(words: Sequence[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    _run([sys.executable, *words], env)
    return time.perf_counter() - began


def _modules(words: Sequence[str], env: dict[str, str]) -> int:
    """Number of imported modules; the list's first line is a heading."""
    stderr = _run([sys.executable, "-X", "importtime", *words], env)
    return stderr.count(b"import time:") - 1


def _run(command: Sequence[str], env: dict[str, str]) -> bytes:
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    # `status` says by its exit code that nothing runs.
    if done.returncode not in {0, 3}:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise Broken(f"`{' '.join(command)}` failed:\n  " + "\n  ".join(last))
    return done.stderr
