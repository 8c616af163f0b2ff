"""Rolling windows and prefill speeds, with a clock made of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.meters import HOUR_S, Meters, Tally, Window

HIT = Tally(n_requests=1, n_hits=1, n_prompt=100, n_cached=80, prefill_s=0.1)
MISS = Tally(n_requests=1, n_prompt=100, prefill_s=0.5)


def test_d15_rates_count_requests_and_tokens() -> None:
    meters = Meters(started=0.0)
    for now, tally in enumerate([HIT, HIT, HIT, MISS]):
        meters.add(float(now), tally)
    hour = meters.rates(4.0).hour
    assert hour.hit_rate == 0.75
    assert hour.token_hit_rate == 0.6
    assert hour.prefill_tps == pytest.approx(160 / 0.8)


def test_d15_old_hits_leave_after_sixty_minutes() -> None:
    meters = Meters(started=0.0)
    meters.add(10.0, HIT)
    meters.add(1000.0, MISS)
    assert meters.rates(3609.0).hour.hit_rate == 0.5
    assert meters.rates(3610.0).hour.hit_rate == 0.0
    later = meters.rates(3610.0)
    assert later.minute == Tally()
    assert later.whole.n_hits == 1


def test_h3_throughput_is_over_the_minute_or_what_there_was_of_it() -> None:
    meters = Meters(started=100.0)
    meters.add(110.0, Tally(n_generated=200, decode_s=8.0))
    assert meters.rates(120.0).generated_tps == 10.0
    assert meters.rates(120.0).whole.decode_tps == 25.0
    assert meters.rates(169.0).generated_tps == pytest.approx(200 / 60)


def test_nothing_measured_is_zero_not_a_division_by_zero() -> None:
    rates = Meters(started=0.0).rates(0.0)
    assert rates.hour.hit_rate == rates.hour.token_hit_rate == rates.generated_tps == 0.0
    assert rates.hour.decode_tps == rates.hour.prefill_tps == rates.hour.ttft_reduction == 0.0


def test_d14_ttft_reduction_is_the_saved_share() -> None:
    assert Tally(ttft_s=1.0, saved_s=3.0).ttft_reduction == 0.75


@given(
    gaps=st.lists(st.floats(0.0, 900.0), max_size=60),
    wait=st.floats(0.0, 2 * HOUR_S),
)
def test_d15_a_window_is_the_sum_of_what_is_young(gaps: list[float], wait: float) -> None:
    window, now, times = Window(HOUR_S), 0.0, []
    for gap in gaps:
        now += gap
        window.add(now, Tally(n_requests=1))
        times.append(now)
    total = window.total(now + wait).n_requests
    oldest = now + wait - HOUR_S
    assert sum(t > oldest + 1 for t in times) <= total <= sum(t > oldest for t in times)
