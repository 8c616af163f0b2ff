"""Conversations of less than a block of tokens are found again after their slot was taken."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.core.preset import KVSpec, SlotSpec
from mlxstack.policy.kv.parking import MIN_PARKED
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

N_SLOTS = 2
N_TALKS = 5
N_ANSWER = 4


@pytest.fixture(params=[("tiny", 16), ("tiny", 8), ("tiny-mla", 16)], ids=str)
def driver(request: pytest.FixtureRequest, model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    kind, bits = request.param
    slots = SlotSpec(count=N_SLOTS, n_ctx=1024)
    kv = KVSpec(bits=bits, group_size=32)
    with running(preset_of(model_of(kind), slots=slots, kv=kv), tmp_path) as found:
        yield found


def n_cached(driver: Driver, tokens: tuple[int, ...], **more: str) -> int:
    """Reused tokens of a prompt whose answer is that from cold."""
    wanted = driver.cold(tokens, N_ANSWER, salt="cold")
    ask = driver.submit(tokens, N_ANSWER, **more)
    driver.finish(ask)
    assert driver.tokens(ask) == wanted
    return int(driver.seated(ask).n_cached)


@pytest.mark.parametrize("n_prompt", [MIN_PARKED, 110, *in_soak(40)])
def test_next_turns_repeats_and_forks_are_found(driver: Driver, n_prompt: int) -> None:
    talks = [prompt(n_prompt, seed=seed) for seed in range(N_TALKS)]
    said = [tuple(driver.answer(talk, N_ANSWER)) for talk in talks]
    for talk, answer in zip(talks, said, strict=True):
        following = talk + answer + prompt(10, seed=50)
        assert n_cached(driver, following) == n_prompt + N_ANSWER - 1
    assert [n_cached(driver, talk) for talk in talks] == [n_prompt - 1] * N_TALKS
    cut = MIN_PARKED + (n_prompt - MIN_PARKED) // 2
    for talk in talks:
        assert n_cached(driver, (*talk[:cut], talk[cut - 1] ^ 1, 7, 9)) >= min(cut, n_prompt - 1)


def test_another_tenant_finds_none(driver: Driver) -> None:
    talks = [prompt(60, seed=seed) for seed in range(N_TALKS)]
    for talk in talks:
        driver.answer(talk, N_ANSWER, salt="one")
    assert [n_cached(driver, talk, salt="other") for talk in talks] == [0] * N_TALKS
    assert [n_cached(driver, talk, salt="one") for talk in talks] == [59] * N_TALKS
