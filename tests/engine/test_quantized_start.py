"""KV that is quantized from a position on: nothing of the other kind serves before or after it."""

from pathlib import Path

import pytest

from mlxstack.core.engine_events import KVSource
from mlxstack.core.preset import KVSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.policy.kv.prefix_index_check import check_index
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

TURN = 200
MINE = prompt(150, seed=1)
NEXT = prompt(110, seed=2)
OTHER = prompt(300, seed=3)


@pytest.fixture(params=["tiny-hybrid", *in_soak("tiny", "tiny-swa")])
def preset(request: pytest.FixtureRequest, model_of: ModelOf) -> Preset:
    """One slot, so that every second conversation has to be parked."""
    kv = KVSpec(bits=8, group_size=32, quantized_start=TURN)
    return preset_of(model_of(request.param), kv=kv, slots=SlotSpec(count=1, n_ctx=1024))


def returns(driver: Driver, tokens: tuple[int, ...], **more: object) -> int:
    """Tokens that were reused when it came back; the answer is the one from cold."""
    ask = driver.submit(tokens, **more)
    driver.finish(ask)
    assert driver.tokens(ask) == driver.cold(tokens)
    check_index(driver.engine.loaded.loop.slot_kv.prefix_cache.index)
    return int(driver.seated(ask).n_cached)


def test_a_conversation_that_grew_past_the_turning_point_comes_back(
    preset: Preset, tmp_path: Path
) -> None:
    with running(preset, tmp_path) as driver:
        history = MINE + tuple(driver.answer(MINE, 8, agent="a"))
        history += NEXT
        history += tuple(driver.answer(history, 8, agent="a"))
        driver.answer(OTHER, 8, agent="b")
        assert returns(driver, history + NEXT, agent="a") >= len(history) - 128
    with running(preset, tmp_path) as driver:
        ask = driver.submit(history + NEXT, agent="a")
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.tokens(ask) == driver.cold(history + NEXT)


def test_a_checkpoint_before_the_turning_point_is_given_up_there(
    preset: Preset, tmp_path: Path
) -> None:
    with running(preset, tmp_path) as driver:
        long = MINE + NEXT
        driver.answer(long, 8, agent="a", checkpoint_positions=(len(MINE), 230))
        assert returns(driver, MINE + prompt(120, seed=5)) == 0
        driver.answer(long, 8, agent="a", checkpoint_positions=(len(MINE), 230))
        driver.answer(OTHER, 8, agent="b")
        assert returns(driver, MINE + prompt(120, seed=6)) == 0
        driver.answer(OTHER, 8, agent="b")
        assert returns(driver, long + prompt(20, seed=7)) >= 230


def test_a_conversation_before_the_turning_point_is_found_again(
    preset: Preset, tmp_path: Path
) -> None:
    with running(preset, tmp_path) as driver:
        history = MINE + tuple(driver.answer(MINE, 8, agent="a"))
        driver.answer(OTHER, 8, agent="b")
        (kept,) = driver.engine.cache.locate_agents(("a",)).result(timeout=PATIENCE_S)
        assert kept.n_tokens >= 128
        assert returns(driver, history + NEXT[:20], agent="a") >= 128
        driver.answer(OTHER, 8, agent="b")
        assert returns(driver, history + NEXT, agent="a") >= 128
    with running(preset, tmp_path) as driver:
        ask = driver.submit(history + prompt(90, seed=8))
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.seated(ask).n_cached >= 128
        assert driver.tokens(ask) == driver.cold(history + prompt(90, seed=8))


def test_a_prefix_before_the_turning_point_can_be_pinned(preset: Preset, tmp_path: Path) -> None:
    with running(preset, tmp_path) as driver:
        driver.answer(MINE, 1, checkpoint_positions=(len(MINE) - 1,))
        pinned = driver.engine.cache.pin("mine", PromptTokens(MINE)).result(timeout=PATIENCE_S)
        assert pinned.n_tokens >= 128
        assert pinned.n_bytes > 0
        driver.answer(OTHER, 8)
        assert returns(driver, MINE + NEXT) == pinned.n_tokens


def test_d23_no_salt_names_kv_of_the_other_kind(preset: Preset, tmp_path: Path) -> None:
    with running(preset, tmp_path) as driver:
        driver.answer(OTHER, 8, salt="\nshort", checkpoint_positions=(150,))
        driver.answer(prompt(300, seed=4), 8)
        assert returns(driver, OTHER[: TURN - 20]) == 0
