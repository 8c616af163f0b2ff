"""The rule on recorded answers of real models: degenerate ones end, the others go on."""

from functools import cache

import pytest

from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request, SamplingParams
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.features.loops.engine import loop_rule
from tests.features.loops.recorded import Copies, Recorded, final_copies, longest_copies, recorded

pytestmark = pytest.mark.mlx

LONGEST_SHORT = 171
"""Tokens of a period of which three copies have 512 tokens at most, about."""
MIN_ENDED = 0.98
N_DEGENERATE = 218


@cache
def degenerate() -> list[tuple[Recorded, Copies]]:
    pairs = [(record, final_copies(record.answer)) for record in recorded()]
    return [(record, copies) for record, copies in pairs if copies is not None]


@cache
def others() -> list[Recorded]:
    return [record for record in recorded() if final_copies(record.answer) is None]


def n_before_end(record: Recorded) -> int | None:
    """Tokens of an answer when the rule ends it."""
    request = Request("recorded", PromptTokens(record.prompt), 10_000, stop_loops=True)
    rule = loop_rule(request, Sampler(SamplingParams(), record.prompt, 0))
    assert rule is not None
    for n_tokens, token in enumerate(record.answer, start=1):
        if rule.observe(token):
            return n_tokens
    return None


def promised(copies: Copies) -> int:
    """Tokens of an answer at which it has ended at the latest."""
    if copies.period > LONGEST_SHORT:
        return copies.start + 3 * copies.period - 1
    return copies.start + 512


def test_degenerate_answers_end_within_the_promise() -> None:
    late = []
    for record, copies in degenerate():
        n_tokens = n_before_end(record)
        if n_tokens is None or n_tokens > promised(copies):
            late.append((record.model, record.temperature, copies, n_tokens))
    assert len(degenerate()) >= N_DEGENERATE
    assert len(late) <= (1 - MIN_ENDED) * len(degenerate()), late


def test_no_answer_ends_without_copies() -> None:
    assert others()
    for record in [*others(), *(record for record, _ in degenerate())]:
        n_tokens = n_before_end(record)
        if n_tokens is None:
            continue
        answer = record.answer[:n_tokens]
        covered = [
            period
            for period in range(1, n_tokens // 2)
            if longest_copies(answer, period) >= max(512, 3 * period - 1)
        ]
        assert covered, (record.model, record.temperature, n_tokens)
