"""Reads a job from stdin, does its trials, writes the findings to stdout."""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.trial import (
    BenchJob,
    BenchResult,
    BuildModel,
    FollowUp,
    FullEngine,
    Joins,
    LoadFiles,
    SingleFloor,
    Steps,
    Trial,
)
from mlxstack.engine import loader
from mlxstack.engine.bench import joins, model, singles, steps, whole, words
from mlxstack.engine.loader import LoadedModel


def main() -> None:
    """One job: a JSON `Job` on stdin, a JSON list of `Finding` on stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=BenchJob)
    sys.stdout.buffer.write(msgspec.json.encode(run(job)))


def run(job: BenchJob) -> list[BenchResult]:
    """The findings of all trials, in order. The model is loaded when a trial first needs it."""
    loaded: LoadedModel | None = None
    found = []
    for trial in job.trials:
        if isinstance(trial, BuildModel):
            model.build(trial)
            found.append(BenchResult())
        elif isinstance(trial, LoadFiles):
            found.append(singles.load(trial))
        elif isinstance(trial, FullEngine):
            found.append(whole.whole(trial, job.model))
        else:
            loaded = loaded or loader.load(ModelSpec(id=job.model), KVSpec())
            found.append(_with_model(trial, loaded))
    return found


def _with_model(trial: Trial, loaded: LoadedModel) -> BenchResult:
    kinds: dict[type, Callable[[Any, LoadedModel], BenchResult]] = {
        Steps: steps.steps,
        Joins: joins.joins,
        SingleFloor: singles.floor,
        FollowUp: words.follow_up,
    }
    return kinds[type(trial)](trial, loaded)


if __name__ == "__main__":
    main()
