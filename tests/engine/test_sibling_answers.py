"""What siblings said is drafted: within its bytes, and never across tenants."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.preset import Speculation
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request, SamplingParams
from mlxstack.engine.decode.ngram_index import ORDER, NgramIndex, extended
from mlxstack.engine.decode.sibling_answers import (
    BYTES_PER_PREFIX,
    BYTES_PER_TOKEN,
    HEAD,
    SiblingAnswers,
)
from mlxstack.policy.drafts.ngram_draft_governor import UNMEASURED
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running

HEADS = [prompt(HEAD, seed=n) for n in range(3)]
RANDOM = SamplingParams(temperature=1.0, seed=7)
"""Draws that repeat nothing, so that only a sibling can have said them."""


def request(head: int = 0, tail: int = 0, salt: str = "", *, use_cache: bool = True) -> Request:
    tokens = HEADS[head] + prompt(5, seed=100 + tail)
    return Request("one", PromptTokens(tokens), 10, salt=salt, use_cache=use_cache)


def gram(tokens: tuple[int, ...]) -> int:
    found = 0
    for token in tokens:
        found = extended(found, token)
    return found


def test_only_siblings_of_the_same_tenant_are_found() -> None:
    said = SiblingAnswers()
    answer = [*range(50, 60)]
    said.remember(request(salt="a"), answer)
    known = gram(tuple(answer[:ORDER]))
    for other, is_found in (
        (request(salt="a", tail=1), True),
        (request(salt="b"), False),
        (request(), False),
        (request(1, salt="a"), False),
    ):
        answers = said.of(other)
        assert answers is not None
        place = answers.place(known)
        assert (place is not None) == is_found
    assert said.of(request(salt="a", use_cache=False)) is None
    assert said.of(Request("short", PromptTokens(HEADS[0][:-1]), 10, salt="a")) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=40))
def test_the_oldest_go_and_the_bytes_stay_bounded(turns: list[tuple[int, int]]) -> None:
    bound = 2 * BYTES_PER_PREFIX + 100 * BYTES_PER_TOKEN
    said = SiblingAnswers(bound)
    for n, (head, n_tokens) in enumerate(turns):
        answer = prompt(n_tokens, seed=n)
        said.remember(request(head, n), answer)
        assert said.n_bytes <= bound
        answers = said.of(request(head))
        if answers and n_tokens > ORDER:
            assert answers.place(gram(answer[-ORDER - 1 : -1])) is not None
    n_held = sum(
        BYTES_PER_PREFIX + BYTES_PER_TOKEN * sum(map(len, one._answers))
        for one in said._by_prefix.values()
    )
    assert said.n_bytes == n_held
    for one in said._by_prefix.values():
        assert {id(place.tokens) for place in one._places.values()} <= set(map(id, one._answers))


def test_the_bytes_are_counted_on_the_safe_side() -> None:
    texts = [prompt(400, seed=n) for n in range(20)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        said = SiblingAnswers()
        for n, text in enumerate(texts):
            said.remember(request(tail=n), text)
        assert tracemalloc.get_traced_memory()[0] - before < said.n_bytes
    finally:
        tracemalloc.stop()


def test_a_prediction_leads_from_the_end_of_the_prompt_and_is_found_again() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 4]
    predicted = list(range(20, 40))
    index = NgramIndex(tokens, predicted)
    assert index.continuation(3) == predicted[:3]
    for token in (*predicted[:5], 99, *predicted[6:9]):
        index.append(token)
    assert index.continuation(4) == predicted[9:13]
    assert NgramIndex(tokens).continuation(1) == [9]
    for token in predicted[9:]:
        index.append(token)
    assert index.continuation(2) == []


@pytest.mark.mlx
def test_the_second_agent_drafts_what_the_first_one_said(model_of: ModelOf, tmp_path: Path) -> None:
    """One model, one prompt, one seed: all say the same, and only siblings gain from it."""
    preset = preset_of(model_of("tiny"), speculation=Speculation.AUTO)
    tokens = HEADS[0] + prompt(9, seed=1)
    with running(preset, tmp_path) as driver:
        driver.engine._loop.batch.costs = UNMEASURED
        accepted = []
        said = []
        calls = []
        for salt in ("a", "a", "b"):
            before = driver.engine.snapshot().counters.n_decode_calls
            ask = driver.submit(tokens, 60, sampling=RANDOM, salt=salt)
            accepted.append(driver.finish(ask).timings.n_accepted)
            calls.append(driver.engine.snapshot().counters.n_decode_calls - before)
            said.append(driver.tokens(ask))
        assert said[0] == said[1] == said[2]
        assert accepted[1] >= 40
        assert accepted[0] < 5
        assert accepted[2] < 5
        assert calls[1] <= 0.5 * calls[0]
        ask = driver.submit(tokens, 60, sampling=RANDOM, salt="c", prediction=tuple(said[0]))
        assert driver.finish(ask).timings.n_accepted >= 40
        assert driver.tokens(ask) == said[0]
        held = driver.engine._loop.slot_kv
        assert held.siblings.n_bytes > 0
        assert held.live_bytes >= held.siblings.n_bytes + sum(c.cache_bytes for c in held.slots)
