"""Stacked recurrent state while rows join, leave, fork and are restored: as cold and alone."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlxstack.core.engine_events import KVSource, TokenSampled
from mlxstack.engine.model import row_views
from mlxstack.engine.model.row_views import StackedStates
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running

pytestmark = pytest.mark.mlx

HEAD = prompt(256, seed=100)
LONG = HEAD + prompt(60, seed=1)
SHORT = prompt(200, seed=2)
FORK = HEAD + prompt(20, seed=3)
NEXT = prompt(25, seed=4)
MARK = (256,)


class Counted(StackedStates):
    """Counts the reads of the array that was written, and the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.n_kept = self.n_copied = 0

    def join(self, rows: list[mx.array]) -> mx.array:
        known = [stacked for stacked, _ in self._by_first.values()]
        joined = super().join(rows)
        is_kept = any(joined is stacked for stacked in known)
        self.n_kept += is_kept
        self.n_copied += not is_kept and len(rows) > 1
        return joined


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Counted:
    states = Counted()
    monkeypatch.setattr(row_views, "STACKED_STATES", states)
    return states


def answers(driver: Driver) -> dict[tuple[int, ...], list[int]]:
    """Answers by prompt: a long one, one that joins and leaves, and a fork of the first."""
    long = driver.submit(LONG, 60, checkpoint_positions=MARK)
    driver.until(long, TokenSampled, 4)
    short = driver.submit(SHORT, 8)
    driver.finish(short)
    fork = driver.submit(FORK, 12, checkpoint_positions=MARK)
    driver.finish(fork)
    assert driver.seated(fork).n_cached == 256
    driver.finish(long)
    asks = {LONG: long, SHORT: short, FORK: fork}
    return {tokens: driver.tokens(ask) for tokens, ask in asks.items()}


def test_rows_that_join_leave_fork_and_come_back_answer_as_alone(
    model_of: ModelOf, tmp_path: Path, states: Counted
) -> None:
    preset = preset_of(model_of("tiny-hybrid"))
    with running(preset, tmp_path) as driver:
        found = answers(driver)
        assert states.n_kept > 0, "no stacked state was read again"
        assert states.n_copied > 0, "the rows never changed"
        driver.catch_up()
    histories = [LONG + tuple(found[LONG]) + NEXT, FORK + tuple(found[FORK]) + NEXT]
    with running(preset, tmp_path) as driver:
        asks = [driver.submit(tokens, 16) for tokens in histories]
        for ask, tokens in zip(asks, histories, strict=True):
            driver.finish(ask)
            assert driver.seated(ask).source is KVSource.DISK
            found[tokens] = driver.tokens(ask)
    with running(preset, tmp_path / "alone") as driver:
        for tokens, answer in found.items():
            assert answer == driver.cold(tokens, len(answer))


def test_steps_of_the_same_rows_read_the_stacked_state_that_they_wrote(
    model_of: ModelOf, tmp_path: Path, states: Counted
) -> None:
    with running(preset_of(model_of("tiny-hybrid")), tmp_path) as driver:
        asks = [driver.submit(prompt(100, seed=i), 60) for i in range(2)]
        for ask in asks:
            driver.until(ask, TokenSampled, 10)
        kept = states.n_kept
        copied = states.n_copied
        for ask in asks:
            driver.until(ask, TokenSampled, 40)
        assert states.n_kept > kept
        assert states.n_copied == copied
        for ask in asks:
            driver.finish(ask)
