"""Time of the rule against repetition, token by token."""

import time
from collections.abc import Sequence
from random import Random

from mlxstack.bench.dev.trials import BenchResult, LoopRuleCost, TrialSamples
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request, SamplingParams
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.features.loops.engine import loop_rule

N_VOCAB = 50_000
PERIOD = 7


def loop_rule_cost(trial: LoopRuleCost) -> BenchResult:
    """Time each kind of answer, once per pass."""
    random = Random(0)
    n_tokens = trial.n_tokens
    plain = [random.randrange(N_VOCAB) for _ in range(n_tokens)]
    twice = plain[: n_tokens // 2] * 2
    copied = (plain[:PERIOD] * n_tokens)[:n_tokens]
    prompt = [random.randrange(N_VOCAB) for _ in range(n_tokens)]
    texts = {
        "plain": (prompt, plain),
        "twice": (prompt, twice),
        "copied": ([*prompt, *copied], copied),
    }
    samples = []
    for who, (before, answer) in texts.items():
        values = tuple(_token_s(before, answer) for _ in range(trial.passes))
        samples.append(TrialSamples(who, "token_s", values))
    return BenchResult(tuple(samples))


def _token_s(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Seconds per token of an answer that goes on to its end."""
    request = Request("cost", PromptTokens(tuple(prompt)), len(answer), stop_loops=True)
    rule = loop_rule(request, Sampler(SamplingParams(), prompt, 0))
    assert rule is not None
    began = time.perf_counter()
    for token in answer:
        if rule.observe(token):
            raise ValueError("the rule ends an answer that may go on")
    return (time.perf_counter() - began) / len(answer)
