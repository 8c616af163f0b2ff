"""Rolling windows, with a clock made of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.status import WindowSums
from mlxstack.engine.stats import HOUR_S, CacheStats, SlidingWindow

HIT = WindowSums(n_requests=1, n_hits=1, n_prompt=100, n_cached=80, ttft_s=0.1)
MISS = WindowSums(n_requests=1, n_prompt=100, ttft_s=0.5)


def test_d15_rates_count_requests_and_tokens() -> None:
    meters = CacheStats()
    for now, tally in enumerate([HIT, HIT, HIT, MISS]):
        meters.add(float(now), tally)
    hour = meters.rates(4.0)["hour"]
    assert (hour.n_hits, hour.n_requests) == (3, 4)
    assert (hour.n_cached, hour.n_prompt) == (240, 400)
    assert hour.ttft_s == pytest.approx(0.8)


def test_d15_old_hits_leave_after_sixty_minutes() -> None:
    meters = CacheStats()
    meters.add(10.0, HIT)
    meters.add(1000.0, MISS)
    assert meters.rates(3609.0)["hour"].n_hits == 1
    assert meters.rates(3610.0)["hour"].n_hits == 0
    later = meters.rates(3610.0)
    assert later["minute"] == WindowSums()
    assert later["whole"].n_hits == 1


@given(gaps=st.lists(st.floats(0.0, 900.0), max_size=60), wait=st.floats(0.0, 2 * HOUR_S))
def test_d15_a_window_is_the_sum_of_what_is_young(gaps: list[float], wait: float) -> None:
    window = SlidingWindow(HOUR_S)
    now = 0.0
    times = []
    for gap in gaps:
        now += gap
        window.add(now, WindowSums(n_requests=1))
        times.append(now)
    total = window.total(now + wait).n_requests
    oldest = now + wait - HOUR_S
    assert sum(t > oldest + 1 for t in times) <= total <= sum(t > oldest for t in times)
