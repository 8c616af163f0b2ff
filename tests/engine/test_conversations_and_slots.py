"""Conversations that share a system prompt: each keeps its slot, and computes what is new."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.core.engine_events import KVSource
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

SYSTEM = prompt(700, seed=1)
OPENING = prompt(5, seed=2)
"""How each assistant's turn begins."""

N_ANSWER = 12
BLOCK = 128


@pytest.fixture(params=["tiny-swa", *in_soak("tiny")])
def driver(request: pytest.FixtureRequest, model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    with running(preset_of(model_of(request.param)), tmp_path) as driver:
        yield driver


def first_turn(n: int) -> tuple[int, ...]:
    """A prompt that differs from the others in three tokens before its last five."""
    return SYSTEM + prompt(3, seed=10 + n) + OPENING


def follow_up(driver: Driver, tokens: tuple[int, ...], ask: str) -> tuple[int, ...]:
    return tokens + tuple(driver.tokens(ask)) + prompt(3, seed=99) + OPENING


def ask(driver: Driver, tokens: tuple[int, ...], name: str | None) -> str:
    cuts = (len(SYSTEM), len(tokens) - len(OPENING))
    ask = driver.submit(tokens, N_ANSWER, display_name=name, checkpoint_positions=cuts)
    driver.finish(ask)
    return ask


@pytest.mark.parametrize("is_named", [True, False])
def test_b5_new_conversations_of_one_system_prompt_take_empty_slots(
    driver: Driver, is_named: bool
) -> None:
    names = [f"chat-{n}" if is_named else None for n in range(3)]
    turns = [first_turn(n) for n in range(3)]
    asks = [ask(driver, turn, name) for turn, name in zip(turns, names, strict=True)]
    assert [driver.seated(one).slot for one in asks] == [0, 1, 2]
    for one in asks[1:]:
        assert driver.seated(one).source is KVSource.FORK
        assert driver.seated(one).n_cached >= len(SYSTEM) - BLOCK
    for number, (turn, name, first) in enumerate(zip(turns, names, asks, strict=True)):
        tokens = follow_up(driver, turn, first)
        second = ask(driver, tokens, name)
        n_new = len(tokens) - driver.seated(second).n_cached
        assert driver.seated(second).slot == number
        assert n_new <= 1 + 3 + len(OPENING), "no token of the answer is computed again"
        assert driver.tokens(second) == driver.cold(tokens, N_ANSWER, slot=number)


def test_b5_a_prompt_that_is_sent_again_keeps_its_slot(driver: Driver) -> None:
    first = ask(driver, first_turn(0), "chat-0")
    other = ask(driver, first_turn(1), "chat-1")
    again = ask(driver, first_turn(0), "chat-0")
    assert [driver.seated(one).slot for one in (first, other, again)] == [0, 1, 0]
    assert driver.tokens(again) == driver.tokens(first)


def test_b5_an_edited_message_leaves_the_old_answer_where_it_was(driver: Driver) -> None:
    first = ask(driver, first_turn(0), "chat-0")
    edited = ask(driver, first_turn(1), "chat-0.2")
    back = follow_up(driver, first_turn(0), first)
    again = ask(driver, back, "chat-0")
    assert [driver.seated(one).slot for one in (first, edited, again)] == [0, 1, 0]
    assert len(back) - driver.seated(again).n_cached <= 1 + 3 + len(OPENING)
