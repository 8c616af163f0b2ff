"""Sampling of a batch: one operation per rule set, and seeded rows draw as they do alone."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from msgspec.structs import replace

from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode import sampler
from mlxstack.engine.decode.sampler import MIN_WIDE_VOCAB, Choice, Sampler, draw, sample_rows

pytestmark = pytest.mark.mlx

VOCAB = 3000
N_STEPS = 40
"""More than the uniform numbers that a row computes at once."""

RULES = [
    SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m)
    for t, p, k, m in product((0.7,), (1.0, 0.9), (0, 20), (0.0, 0.05))
]


def logits_of(step: int, row: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Logits (1, VOCAB) with a likely head and a long tail."""
    noise = mx.random.normal((1, VOCAB), key=mx.random.key(1000 * step + row))
    return (noise * 3).astype(dtype)


def only(choices: tuple[Choice, ...] | Exception) -> Choice:
    """The one choice of a row without a draft."""
    assert isinstance(choices, tuple)
    (choice,) = choices
    return choice


def drawn(samplings: list[SamplingParams], dtype: mx.Dtype = mx.float32) -> list[list[int]]:
    """The tokens of rows that decode together, over N_STEPS steps."""
    choosers = [Sampler(sampling, [], 0) for sampling in samplings]
    tokens: list[list[int]] = [[] for _ in samplings]
    for step in range(N_STEPS):
        logits = mx.concatenate([logits_of(step, row, dtype) for row in range(len(samplings))])
        for row, choices in enumerate(sample_rows(choosers, logits)):
            choice = only(choices)
            tokens[row].append(int(choice.token.item().real))
    return tokens


def reference(sampling: SamplingParams, row: int) -> list[int]:
    """mlx-lm's filters and `mx.random.categorical` over the whole vocabulary, one row alone."""
    key = mx.random.key(sampling.seed)
    tokens = []
    for step in range(N_STEPS):
        logits = logits_of(step, row)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if sampling.top_k:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        key, now = mx.random.split(key)
        token = mx.random.categorical(logprobs * (1 / sampling.temperature), key=now)
        tokens.append(int(token.item().real))
    return tokens


def seeded(sampling: SamplingParams, seed: int) -> SamplingParams:
    return replace(sampling, seed=seed)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_seeded_row_draws_the_same_beside_others_and_as_mlx_lm_filters_it(
    rules: SamplingParams,
) -> None:
    samplings = [seeded(rules, 7 + row) for row in range(4)]
    together = drawn([*samplings, SamplingParams(temperature=1.0), SamplingParams()])[:4]
    assert together == [reference(sampling, row) for row, sampling in enumerate(samplings)]
    assert drawn(samplings[:1]) == together[:1]


def test_rows_with_equal_rules_are_one_operation(tmp_path: Path) -> None:
    for rules in (
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, top_logprobs=5),
    ):
        one, eight = (n_graph_nodes(rules, n, tmp_path) for n in (1, 8))
        assert eight <= 1.3 * one, (rules, one, eight)
    assert (
        n_graph_nodes(SamplingParams(), 8, tmp_path)
        <= n_graph_nodes(SamplingParams(), 1, tmp_path) + 1
    )


def n_graph_nodes(rules: SamplingParams, n_rows: int, folder: Path, n_vocab: int = VOCAB) -> int:
    choosers = [Sampler(seeded(rules, row), [], 0) for row in range(n_rows)]
    logits = mx.random.normal((n_rows, n_vocab))
    mx.eval(logits)
    arrays: list[Any] = []
    for choices in sample_rows(choosers, logits):
        arrays += only(choices).arrays
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), *arrays)
    return len(re.findall("rectangle", path.read_text()))


@pytest.mark.parametrize(
    "n_vocab, rules",
    [
        (VOCAB, SamplingParams(temperature=0.7, top_p=0.8, top_k=20, top_logprobs=5)),
        (MIN_WIDE_VOCAB, SamplingParams(temperature=0.7, top_p=0.8, top_logprobs=5)),
    ],
    ids=["top_k", "top_p of a large vocabulary"],
)
def test_no_rule_sorts_a_large_vocabulary(n_vocab: int, rules: SamplingParams) -> None:
    chooser = Sampler(seeded(rules, 1), [], 0)
    sizes = []
    sort = mx.sort
    argsort = mx.argsort
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "sort", lambda a, axis=-1: sizes.append(a.size) or sort(a, axis=axis))
        patch.setattr(
            mx, "argsort", lambda a, axis=-1: sizes.append(a.size) or argsort(a, axis=axis)
        )
        sample_rows([chooser], mx.random.normal((1, n_vocab)))
    assert sizes
    assert max(sizes) <= 20


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 200.0])
def test_top_p_keeps_what_sorting_a_large_vocabulary_keeps(top_p: float, scale: float) -> None:
    logits = mx.random.normal((3, MIN_WIDE_VOCAB), key=mx.random.key(4)) * scale
    logits[1] = mx.round(logits[1])
    logits[2, MIN_WIDE_VOCAB // 2 :] = -float("inf")
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    probabilities = np.array(mx.exp(logprobs)).astype(np.float64)
    found = np.array(sampler._within_top_p(logprobs, top_p)) > -np.inf
    for kept, row in zip(found, probabilities, strict=True):
        last = row[kept].min()
        assert kept.sum() == (row >= last).sum(), "the likeliest ones, with all ties"
        assert row[kept].sum() >= min(top_p, row.sum()) - 1e-4
        assert row[row > last].sum() < top_p + 1e-4


def test_top_p_of_a_large_vocabulary_takes_few_operations_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = SamplingParams(temperature=0.7, top_p=0.8)
    logits = mx.random.normal((8, MIN_WIDE_VOCAB), key=mx.random.key(6)) * 4

    def tokens() -> list[int]:
        choosers = [Sampler(seeded(rules, row), [], 0) for row in range(8)]
        return [int(only(row).token.item().real) for row in sample_rows(choosers, logits)]

    by_bits = tokens()
    n_by_bits = n_graph_nodes(rules, 2, tmp_path, MIN_WIDE_VOCAB)
    monkeypatch.setattr(sampler, "has_gpu", lambda: True)
    by_sorting = tokens()
    n_by_sorting = n_graph_nodes(rules, 2, tmp_path, MIN_WIDE_VOCAB)
    assert by_sorting == by_bits
    assert n_by_sorting < 40
    assert n_by_bits > 100


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_logprobs_of_half_precision_logits_are_float32(dtype: mx.Dtype) -> None:
    logits = mx.concatenate([mx.array([[20.0, 10.0, 9.0]]), mx.full((1, 997), -20.0)], axis=1)
    half = logits.astype(dtype)
    choice = only(*sample_rows([Sampler(SamplingParams(top_logprobs=1000), [], 0)], half))
    _, logprob, _, values = choice.arrays
    exact = np.array(half.astype(mx.float32)).astype(np.float64)[0]
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    assert abs(float(logprob.item().real) - exact[0]) < 1e-6
    assert abs(float(mx.exp(values).sum().item().real) - 1) < 1e-5


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    logits = logits_of(0, 0)
    choice = only(*sample_rows([Sampler(SamplingParams(top_logprobs=5), [], 0)], logits))
    assert choice.arrays[2].tolist() == mx.argsort(-logits[0])[:5].tolist()
    choice = only(*sample_rows([Sampler(SamplingParams(top_logprobs=2 * VOCAB), [], 0)], logits))
    assert choice.arrays[2].size == VOCAB


def test_a_row_whose_rules_raise_gets_its_exception_alone() -> None:
    class Wrong:
        def advance(self, token: int) -> None:
            """Nothing."""

        def mask(self) -> bytes | None:
            raise ValueError("wrong grammar")

    choosers = [Sampler(SamplingParams(), [], 0), Sampler(SamplingParams(), [], 0, Wrong())]
    good, bad = sample_rows(choosers, mx.random.normal((2, VOCAB)))
    assert only(good).token.size == 1
    assert isinstance(bad, ValueError)


def test_a_target_that_rounds_to_the_total_stays_within_the_allowed_tokens() -> None:
    logits = mx.where(mx.arange(VOCAB) < 3, 0.0, -float("inf"))[None]
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    for rules in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=20)):
        [choice] = draw(rules, logits, [largest])
        assert choice.token.item() == 2
        [choice] = draw(rules, logits, [1.0])
        assert choice.token.item() == 2
