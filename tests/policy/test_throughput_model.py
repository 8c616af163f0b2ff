"""Learning how fast the machine is."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.scheduling.chunked_prefill import (
    ThroughputModel,
    observe_decode,
    observe_prefill,
    prefill_s,
    tokens_within,
)


def seconds(start: int, n: int, tps: float = 1500.0, slowdown: float = 5e-5) -> float:
    """A machine whose attention looks back at everything."""
    return n / tps * (1 + slowdown * (start + n / 2))


def learn(bites: list[tuple[int, int]], noise: float = 0.0, seed: int = 0) -> ThroughputModel:
    """The speed after these bites (start, tokens), each measured with some noise."""
    speed = ThroughputModel()
    random = Random(seed)
    for start, n in bites:
        took = seconds(start, n) * (1 + noise * random.uniform(-1, 1))
        speed = observe_prefill(speed, start, n, took)
    return speed


def test_the_first_bite_tells_the_speed() -> None:
    speed = observe_prefill(ThroughputModel(), 0, 128, 0.1)
    assert (speed.prefill_tps, speed.slowdown) == (1280.0, 0.0)


def test_a_prompt_from_beginning_to_end_tells_the_slowdown() -> None:
    speed = learn([(start, 512) for start in range(0, 32_768, 512)])
    assert speed.slowdown == pytest.approx(5e-5, rel=0.01)
    assert speed.prefill_tps == pytest.approx(1500, rel=0.01)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 100_000), min_size=20, max_size=40))
def test_z6_once_known_other_positions_are_foretold_within_a_quarter(
    seed: int, starts: list[int]
) -> None:
    """Prompts at very different positions take turns, every bite measured with 5 % noise."""
    known = [(0, 256), (90_000, 256), (40_000, 256), (5_000, 256)]
    speed = learn([*known, *((start, 256) for start in starts)], noise=0.05, seed=seed)
    for start in (0, 1_000, 30_000, 90_000):
        assert prefill_s(speed, start, 256) == pytest.approx(seconds(start, 256), rel=0.25)


def test_a_machine_that_gets_slower_is_noticed_after_a_few_bites() -> None:
    speed = learn([(start, 512) for start in range(0, 32_768, 512)])
    for start in range(0, 2560, 512):
        speed = observe_prefill(speed, start, 512, 3 * seconds(start, 512))
    assert prefill_s(speed, 0, 512) == pytest.approx(3 * seconds(0, 512), rel=0.1)


@given(st.integers(0, 100_000), st.floats(0.01, 2), st.floats(10, 1e5), st.floats(0, 1e-3))
def test_e14_tokens_within_fit_and_waste_nothing(
    start: int, budget: float, tps: float, slowdown: float
) -> None:
    speed = ThroughputModel(tps, 0.0, slowdown)
    n = tokens_within(speed, start, budget)
    assert prefill_s(speed, start, n) <= budget * (1 + 1e-9)
    assert prefill_s(speed, start, n + 1) > budget * (1 - 1e-9)


@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(1, 4096), st.floats(1e-6, 10)), max_size=30
    )
)
def test_no_measurement_breaks_it(bites: list[tuple[int, int, float]]) -> None:
    speed = ThroughputModel()
    for start, n, took in bites:
        speed = observe_prefill(speed, start, n, took)
        assert speed.slowdown >= 0
        assert (speed.prefill_tps > 0) == (speed.trend.n > 0)
        assert prefill_s(speed, 50_000, 128) >= 0


def test_tiny_bites_and_stopped_clocks_say_nothing() -> None:
    speed = learn([(0, 512)])
    assert observe_prefill(speed, 512, 15, 9.0) == speed
    assert observe_prefill(speed, 512, 512, 0.0) == speed


def test_nothing_known_foretells_nothing() -> None:
    assert prefill_s(ThroughputModel(), 0, 512) == 0.0


def test_a_slower_step_counts_at_once_and_a_faster_one_by_and_by() -> None:
    speed = observe_decode(observe_decode(ThroughputModel(), 0.02), 0.05)
    assert speed.decode_s == 0.05
    assert observe_decode(speed, 0.02).decode_s == pytest.approx(0.044)
