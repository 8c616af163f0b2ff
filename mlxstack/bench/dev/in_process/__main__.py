"""Child process: reads a job from stdin, writes the results to stdout."""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from mlxstack.bench.dev.in_process import (
    baselines,
    batch_join,
    decode_steps,
    drafts,
    full_engine,
    loop_rule,
    random_llama,
    text_work,
)
from mlxstack.bench.dev.trials import (
    BatchAnswers,
    BenchJob,
    BenchResult,
    BuildModel,
    Drafts,
    ExactSteps,
    FollowUp,
    FullEngine,
    Joins,
    LoadFiles,
    LoopRuleCost,
    SingleFloor,
    Steps,
    Trial,
)
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel


def main() -> None:
    """One JSON `BenchJob` on stdin, `BenchResult`s on stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=BenchJob)
    sys.stdout.buffer.write(msgspec.json.encode(run(job)))


def run(job: BenchJob) -> list[BenchResult]:
    """Findings of all trials; a trial loads the model when needed."""
    loaded: LoadedModel | None = None
    results = []
    for trial in job.trials:
        if isinstance(trial, BuildModel):
            random_llama.build(trial)
            results.append(BenchResult())
        elif isinstance(trial, LoadFiles):
            results.append(baselines.load(trial))
        elif isinstance(trial, LoopRuleCost):
            results.append(loop_rule.loop_rule_cost(trial))
        elif isinstance(trial, FullEngine):
            results.append(full_engine.whole(trial, job.model))
        elif isinstance(trial, Drafts):
            results.append(drafts.drafts(trial, job.model))
        else:
            loaded = loaded or loader.load(ModelSpec(id=job.model), KVSpec())
            results.append(_with_model(trial, loaded))
    return results


def _with_model(trial: Trial, loaded: LoadedModel) -> BenchResult:
    kinds: dict[type, Callable[[Any, LoadedModel], BenchResult]] = {
        Steps: decode_steps.steps,
        ExactSteps: decode_steps.exact_steps,
        Joins: batch_join.joins,
        SingleFloor: baselines.floor,
        BatchAnswers: baselines.batch_answers,
        FollowUp: text_work.follow_up,
    }
    return kinds[type(trial)](trial, loaded)


if __name__ == "__main__":
    main()
