"""Trials in a child process of a sandbox, and its random model."""

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from mlxstack.bench.dev.trials import BenchJob, BenchResult, BuildModel, Trial
from mlxstack.bench.servers import Sandbox
from mlxstack.core.errors import Broken


def with_model(stage: Sandbox, name: str, build: BuildModel) -> Sandbox:
    """Sandbox with the wanted model, built now for `random`."""
    if name != "random":
        return msgspec.structs.replace(stage, model=name)
    stage.say("building the random model")
    measure(stage, [build])
    return msgspec.structs.replace(stage, model=build.folder)


def measure(stage: Sandbox, trials: Sequence[Trial]) -> list[BenchResult]:
    """Run trials in a fresh process. Raises Broken with its log."""
    job = msgspec.json.encode(BenchJob(stage.model, tuple(trials)))
    command = [sys.executable, "-m", "mlxstack.bench.dev.in_process"]
    done = subprocess.run(command, input=job, capture_output=True, env=stage.env, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-8:]
        raise Broken("the in-process measurement failed:\n  " + "\n  ".join(words))
    return msgspec.json.decode(done.stdout, type=list[BenchResult])
