"""The same prompt again is answered from the logits that it left, and as if computed alone."""

from pathlib import Path
from typing import Literal

import pytest

from mlxstack.core.engine_events import PrefillProgress, TokenSampled
from mlxstack.core.preset import KVSpec, PrefillSpec, SlotSpec
from mlxstack.core.request import SamplingParams
from tests.conftest import ModelOf
from tests.engine.harness import Driver, array_bytes, preset_of, prompt, running
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

PROMPT = prompt(150)
ONE_SLOT = SlotSpec(count=1, n_ctx=1024)
DRAWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, repetition_penalty=1.3, top_logprobs=2),
]
OTHERS = [("tiny", 8), ("tiny-mla", 16), ("tiny-swa", 16), ("tiny-hybrid", 16)]
"""Kinds of models and bits of their KV, beside a plain one."""


def n_passes(driver: Driver) -> int:
    """Decode passes so far."""
    return driver.engine.snapshot().counters.n_decode_calls


def parts(driver: Driver, ask: str) -> list[TokenSampled]:
    return [event for event in driver.listener.events[ask] if isinstance(event, TokenSampled)]


@pytest.mark.parametrize(
    ("kind", "bits", "sampling"),
    [
        *(("tiny", 16, sampling) for sampling in DRAWS),
        *((kind, bits, DRAWS[0]) for kind, bits in OTHERS),
        *in_soak(*((kind, bits, one) for kind, bits in OTHERS for one in DRAWS[1:])),
    ],
)
def test_the_same_prompt_again_says_what_it_says_alone(
    model_of: ModelOf, tmp_path: Path, kind: str, bits: Literal[4, 8, 16], sampling: SamplingParams
) -> None:
    preset = preset_of(model_of(kind), slots=ONE_SLOT, kv=KVSpec(bits=bits, group_size=32))
    with running(preset, tmp_path) as driver:
        cold = driver.cold(PROMPT, 12, sampling=sampling)
        driver.answer(PROMPT, 3)
        for n in (1, 12, 5):
            ask = driver.submit(PROMPT, n, sampling=sampling)
            driver.finish(ask)
            assert driver.tokens(ask) == cold[:n]


def test_the_same_prompt_again_needs_no_pass(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        said = driver.answer(PROMPT, 8)
        before = n_passes(driver)
        counted = driver.engine.snapshot().counters
        again = driver.submit(PROMPT, 1)
        driver.finish(again)
        assert driver.tokens(again) == said[:1]
        assert n_passes(driver) == before
        assert driver.seated(again).n_cached == len(PROMPT)
        now = driver.engine.snapshot().counters
        assert now.n_cached_tokens == counted.n_cached_tokens + len(PROMPT)
        assert now.n_prompt_tokens == counted.n_prompt_tokens
        assert driver.answer(PROMPT, 2) == said[:2]
        assert n_passes(driver) == before + 1
        assert driver.cold(PROMPT, 1) == said[:1]
        assert n_passes(driver) == before + 2, "without the cache it is computed"


def test_logits_belong_to_the_whole_prompt(model_of: ModelOf, tmp_path: Path) -> None:
    others = [(*PROMPT[:-1], PROMPT[-1] ^ 1), PROMPT[:-1], (*PROMPT, 7), prompt(150, seed=1)]
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        cold = {tokens: driver.cold(tokens, 6) for tokens in (PROMPT, *others)}
        for other in others:
            for tokens in (PROMPT, other, other, PROMPT):
                assert driver.answer(tokens, 6) == cold[tokens]


def test_logits_go_with_the_tokens(model_of: ModelOf, tmp_path: Path) -> None:
    other = (*PROMPT[:-1], PROMPT[-1] ^ 1)
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefill=PrefillSpec(chunk_size=16))
    with running(preset, tmp_path) as driver:
        cold = driver.cold(other, 6)
        driver.answer(PROMPT, 6)
        longer = driver.submit((*other, *prompt(700, seed=2)), 6)
        driver.until(longer, PrefillProgress, 2)
        driver.engine.cancel(longer)
        driver.finish(longer)
        assert len(driver.context(0)) < 700, "its prompt was not complete"
        assert driver.answer(other, 6) == cold


def test_a_prompt_that_ends_in_the_answer_is_another_one(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        longer = (*PROMPT, *driver.answer(PROMPT, 6)[:3])
        cold = driver.cold(longer, 6)
        driver.answer(PROMPT, 6)
        assert driver.answer(longer, 6) == cold
        assert driver.answer(longer, 6) == cold


def test_a_repeated_prompt_joins_rows_that_decode(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        cold = driver.cold(PROMPT, 20)
        neighbour = prompt(90, seed=3)
        alone = driver.cold(neighbour, 400, slot=1)
        driver.answer(PROMPT, 4, slot=0)
        row = driver.submit(neighbour, 400, slot=1)
        driver.until(row, TokenSampled, 5)
        for _ in range(3):
            assert driver.answer(PROMPT, 20, slot=0) == cold
        assert len(driver.tokens(row)) < 400, "it still decoded"
        driver.finish(row)
        assert driver.tokens(row) == alone


def test_logprobs_are_those_of_the_first_time(model_of: ModelOf, tmp_path: Path) -> None:
    sampling = SamplingParams(top_logprobs=3)
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        asks = [driver.submit(PROMPT, 2, sampling=sampling) for _ in range(2)]
        for ask in asks:
            driver.finish(ask)
        first, again = (parts(driver, ask)[0] for ask in asks)
        assert (first.logprob, first.top) == (again.logprob, again.top)
        assert len(again.top) == 3


def test_a_saved_and_restored_or_parked_prompt_is_computed(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        said = driver.answer(PROMPT, 6)
        driver.answer(prompt(200, seed=9), 6)
        before = n_passes(driver)
        assert driver.answer(PROMPT, 1) == said[:1]
        assert n_passes(driver) == before + 1, "it came from parked KV"
        assert driver.answer(PROMPT, 6) == said


class OneToken:
    """Grammar whose answer is one token; its mask raises where `is_broken`."""

    is_ruled = True

    def __init__(self, token: int, *, is_broken: bool = False) -> None:
        self._token = token
        self._is_broken = is_broken

    def start(self) -> "OneToken":
        return self

    def mask(self) -> bytes:
        if self._is_broken:
            raise ValueError("the grammar broke")
        return (1 << self._token).to_bytes(64, "little")

    def advance(self, token: int) -> None:
        assert token == self._token

    def forced_tokens(self) -> tuple[int, ...]:
        return ()

    def close_thought(self) -> bool:
        return False

    def position(self) -> int:
        return 0

    def rewind(self, position: int) -> None:
        assert position == 0


def test_a_grammar_rules_the_first_token_and_fails_alone(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        said = driver.answer(PROMPT, 6)
        forbidden = (said[0] + 1) % 256
        ruled = OneToken(forbidden)
        assert driver.answer(PROMPT, 3, constraint=ruled) == [forbidden] * 3
        with pytest.raises(Exception, match="the grammar broke"):
            driver.answer(PROMPT, 3, constraint=OneToken(1, is_broken=True))
        assert driver.answer(PROMPT, 6) == said


def test_logits_are_counted_and_freed(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        driver.answer(PROMPT, 2)
        context = driver.engine.loaded.loop.slots[0]
        kept = context.logits_after(PROMPT)
        assert kept is not None
        n_bytes = kept.nbytes
        del kept
        held = array_bytes()
        counted = context.n_bytes
        context._prompt_logits = None
        assert counted - context.n_bytes == n_bytes
        assert n_bytes <= held - array_bytes() < 2 * n_bytes
