"""Greedy output is the same alone, all together, and joining one by one (E2, E3, Z3, Z4)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import pytest

from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.preset import KVSpec, ModelSpec, SlotSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.repetition import in_soak

KINDS = ["tiny-swa", "tiny-hybrid", *in_soak("demo", "tiny", "tiny-sinks", "tiny-mla")]
PROMPTS = [prompt(n, seed=n) for n in (2, 5, 17, 33, 90, 128, 150, 300)]


@pytest.fixture(scope="module", params=KINDS)
def driver(
    request: pytest.FixtureRequest, model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    model = "demo" if request.param == "demo" else model_of(request.param)
    preset = preset_of(Path(model), slots=SlotSpec(count=8, n_ctx=1024))
    with running(preset, tmp_path_factory.mktemp("home")) as driver:
        assert driver.engine.snapshot().is_batching
        yield driver


def test_e3_together_equals_alone(driver: Driver) -> None:
    alone = [driver.cold(p) for p in PROMPTS]
    asks = [driver.submit(p, use_cache=False) for p in PROMPTS]
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == alone


def test_e1_joining_one_by_one_equals_alone(driver: Driver) -> None:
    alone = [driver.cold(p, 24) for p in PROMPTS]
    asks: list[str] = []
    for p in PROMPTS:
        if asks:
            driver.until(asks[-1], TokenSampled, 2)
        asks.append(driver.submit(p, 24, use_cache=False))
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == alone


def test_e2_one_forward_for_all_rows(driver: Driver) -> None:
    before = driver.engine.snapshot().counters
    asks = [driver.submit(p, 50, use_cache=False) for p in PROMPTS[:3]]
    for ask in asks:
        driver.finish(ask)
    after = driver.engine.snapshot().counters
    calls = after.n_decode_calls - before.n_decode_calls
    rows = after.n_decode_rows - before.n_decode_rows
    assert calls < 70
    assert rows / calls > 2


def test_z4_seeds_penalties_and_bias_stay_in_the_batch(driver: Driver) -> None:
    rules = [
        SamplingParams(temperature=1.0, seed=1, top_p=0.9),
        SamplingParams(temperature=0.8, seed=2, top_k=20, repetition_penalty=1.3),
        SamplingParams(temperature=1.2, seed=3, min_p=0.05, presence_penalty=0.5),
        SamplingParams(logit_bias=((7, 5.0),), frequency_penalty=0.4),
        SamplingParams(top_logprobs=3),
    ]
    alone = [driver.cold(p, sampling=s) for p, s in zip(PROMPTS, rules, strict=False)]
    before = driver.engine.snapshot().counters.n_decode_calls
    asks = [
        driver.submit(p, sampling=s, use_cache=False) for p, s in zip(PROMPTS, rules, strict=False)
    ]
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == alone
    assert driver.engine.snapshot().counters.n_decode_calls - before < 16 * len(rules) / 2


def test_z4_another_seed_gives_another_answer(driver: Driver) -> None:
    hot = [SamplingParams(temperature=2.0, seed=s) for s in (1, 1, 2)]
    one, same, other = (driver.cold(PROMPTS[2], 30, sampling=s) for s in hot)
    assert one == same
    assert one != other


def test_b1_logprobs_are_of_the_chosen_token(driver: Driver) -> None:
    ask = driver.submit(PROMPTS[3], 4, sampling=SamplingParams(top_logprobs=5))
    driver.finish(ask)
    for event in driver.events(ask, TokenSampled):
        assert event.logprob is not None
        assert event.top[0] == (event.token, pytest.approx(event.logprob))
        assert len(event.top) == 5
        assert sorted((lp for _, lp in event.top), reverse=True) == [lp for _, lp in event.top]


ROWS_BITS: tuple[Literal[4, 8, 16], ...] = (8, 16, 4, 16)


@pytest.mark.parametrize("quantize_from", [0, 40])
def test_z3_rows_of_different_kv_precision_in_one_batch(
    model_of: ModelOf, quantize_from: int
) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    makers = [
        CacheFactory(model, KVSpec(bits=bits, group_size=32, quantized_start=quantize_from))
        for bits in ROWS_BITS
    ]
    prompts = PROMPTS[2:6]
    alone = [_decode(model, [m], [p])[0] for m, p in zip(makers, prompts, strict=True)]
    assert _decode(model, makers, prompts) == alone


def test_e2_one_forward_per_token_and_no_token_late(driver: Driver) -> None:
    before = driver.engine.snapshot().counters.n_decode_calls
    for n in (1, 5):
        ask = driver.submit(PROMPTS[3], n, use_cache=False)
        driver.finish(ask)
        assert len(driver.tokens(ask)) == n
    assert driver.engine.snapshot().counters.n_decode_calls - before == 6


@pytest.mark.parametrize("kind", ["tiny", "tiny-hybrid"])
def test_a_step_ahead_chooses_the_same_tokens_and_feeds_no_finished_row(
    model_of: ModelOf, kind: str
) -> None:
    model = loader.load(ModelSpec(id=str(model_of(kind))), KVSpec()).model
    makers = [CacheFactory(model, KVSpec())] * 3
    at_once, ahead = (Batch(ModelRunner(model)) for _ in range(2))
    at_once.is_ahead = False
    ahead.is_ahead = True
    assert _run(ahead, makers, PROMPTS[:3], 9) == _run(at_once, makers, PROMPTS[:3], 9)
    assert ahead.n_calls == at_once.n_calls == 9


def _decode(
    model: object, makers: list[CacheFactory], prompts: list[tuple[int, ...]]
) -> list[list[int]]:
    return _run(Batch(ModelRunner(model)), makers, prompts, 20)


def _run(
    batch: Batch, makers: list[CacheFactory], prompts: list[tuple[int, ...]], n: int
) -> list[list[int]]:
    model: Any = batch.runner.model
    for slot, (cache_factory, tokens) in enumerate(zip(makers, prompts, strict=True)):
        context = SlotContext(cache_factory)
        model(mx.array([tokens[:-1]]), cache=context.caches)
        context.extend(tokens[:-1])
        sampler = Sampler(SamplingParams(), tokens, 0)
        batch.join(BatchRow(slot, context, sampler, tokens[-1], n, request=str(slot)))
    answers: list[list[int]] = [[] for _ in prompts]
    while min(len(answer) for answer in answers) < n:
        for sampled in batch.step():
            answers[int(sampled.request)].append(sampled.token)
    return answers
