"""Reads a job from stdin, does its trials, writes the findings to stdout."""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.trial import (
    Build,
    Finding,
    Floor,
    FollowUp,
    Job,
    Joins,
    Load,
    Steps,
    Trial,
    Whole,
)
from mlxstack.engine import loader
from mlxstack.engine.bench import joins, model, singles, steps, whole, words
from mlxstack.engine.loader import Loaded


def main() -> None:
    """One job: a JSON `Job` on stdin, a JSON list of `Finding` on stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(run(job)))


def run(job: Job) -> list[Finding]:
    """The findings of all trials, in order. The model is loaded when a trial first needs it."""
    loaded: Loaded | None = None
    found = []
    for trial in job.trials:
        if isinstance(trial, Build):
            model.build(trial)
            found.append(Finding())
        elif isinstance(trial, Load):
            found.append(singles.load(trial))
        elif isinstance(trial, Whole):
            found.append(whole.whole(trial, job.model))
        else:
            loaded = loaded or loader.load(ModelSpec(id=job.model), KVSpec())
            found.append(_with_model(trial, loaded))
    return found


def _with_model(trial: Trial, loaded: Loaded) -> Finding:
    kinds: dict[type, Callable[[Any, Loaded], Finding]] = {
        Steps: steps.steps,
        Joins: joins.joins,
        Floor: singles.floor,
        FollowUp: words.follow_up,
    }
    return kinds[type(trial)](trial, loaded)


if __name__ == "__main__":
    main()
