"""The past is data: folded from frames, bounded, the same whatever was drawn."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.client.types import FeedLost
from mlxstack.core.engine_snapshot import Counters, Snapshot
from mlxstack.core.status import StatusFrame, ThroughputSample
from mlxstack.tui.state import (
    WINDOW_S,
    DashboardState,
    LinkState,
    decode_rate,
    prompt_rate,
    reduce,
    series,
)


def frame(at: float, n_prompt: int = 0, n_generated: int = 0, n_calls: int = 0) -> StatusFrame:
    counters = Counters(
        n_prompt_tokens=n_prompt, n_generated_tokens=n_generated, n_model_calls=n_calls
    )
    return StatusFrame(at=at, snapshot=Snapshot(counters=counters))


def folded(*news: StatusFrame | FeedLost) -> DashboardState:
    model = DashboardState()
    for one in news:
        model = reduce(model, one)
    return model


def test_rates_are_tokens_per_second_of_the_last_two() -> None:
    model = folded(*(frame(100.0 + i / 4, n_prompt=i * 100, n_generated=i * 5) for i in range(41)))
    assert round(prompt_rate(model)) == 400
    assert round(decode_rate(model)) == 20


def test_rates_fall_to_nothing_when_nothing_happens() -> None:
    model = folded(
        frame(100.0), frame(101.0, 800, 40), frame(102.0, 800, 40), frame(104.0, 800, 40)
    )
    assert (prompt_rate(model), decode_rate(model)) == (0.0, 0.0)


def test_the_first_frame_of_a_busy_service_is_no_burst() -> None:
    model = folded(frame(100.0, 1_000_000, 50_000, 9))
    assert (prompt_rate(model), decode_rate(model)) == (0.0, 0.0)
    assert all(pair in ((None, None, None), (0.0, 0.0, 0.0)) for pair in series(model, 30))


def test_series_is_none_where_nothing_was_seen_and_sums_to_the_counters() -> None:
    model = folded(*(frame(1000.0 + i, n_prompt=i * 10, n_generated=i) for i in range(101)))
    shown = series(model, 60)
    step = WINDOW_S / 60
    assert shown[0] == (None, None, None)
    seen = [pair for pair in shown if pair[1] is not None]
    assert len(seen) in (20, 21)
    assert round(sum(pair[1] or 0 for pair in seen) * step) in range(95, 106)


def test_whoever_attaches_late_sees_the_last_minutes() -> None:
    past = tuple(ThroughputSample(1000.0 + i, i * 10, i) for i in range(100))
    model = folded(replace(frame(1100.0, 1000, 100), past=past))
    seen = [pair[1] for pair in series(model, 60) if pair[1] is not None]
    assert len(seen) in (20, 21)
    assert round(sum(seen) * WINDOW_S / 60) in range(95, 101)
    assert (round(prompt_rate(model)), round(decode_rate(model))) == (10, 1)
    assert model.frame.past == ()


def test_h5_after_a_gap_the_service_tells_what_happened_meanwhile() -> None:
    before = [frame(1000.0 + i, i * 10, i, i) for i in range(20)]
    past = tuple(
        ThroughputSample(950.0 + i, max(0, i - 50) * 10, max(0, i - 50)) for i in range(140)
    )
    late = replace(frame(1090.0, 900, 90, 90), past=past)
    model = folded(*before, FeedLost("gone", 0.1), late)
    at = [mark.time for mark in model.samples]
    assert at == sorted(set(at))
    assert at[0] == 1000.0
    assert len([pair for pair in series(model, 300) if pair[1]]) in range(88, 92)


def test_h5_the_past_of_a_restarted_service_counts_on_from_the_one_before() -> None:
    before = [frame(1000.0 + i, i * 10, i, i) for i in range(20)]
    past = tuple(ThroughputSample(1030.0 + i, i * 10, i) for i in range(10))
    late = replace(frame(1040.0, 100, 10, 10), past=past)
    model = folded(*before, FeedLost("gone", 0.1), late)
    assert model.now.n_generated == 19 + 10
    assert all((pair[1] or 0) >= 0 for pair in series(model, 300))
    assert round(sum(pair[1] or 0 for pair in series(model, 300))) == 29


def test_h5_a_restart_counts_on_and_is_no_negative_speed() -> None:
    lost = FeedLost("the service ended the feed", 0.05)
    before = [frame(100.0 + i, i * 50, i * 10, i) for i in range(10)]
    after = [frame(115.0 + i, i * 50, i * 10, i) for i in range(10)]
    assert folded(*before, lost).link.state is LinkState.LOST
    model = folded(*before, lost, *after)
    assert model.link.state is LinkState.LIVE
    assert model.now.n_generated == 90 + 90
    assert all((pair[0] or 0) >= 0 for pair in series(model, 40))


def test_h5_a_restart_is_no_speed_of_its_own() -> None:
    before = [frame(100.0 + i / 3, i * 50, i * 10, i) for i in range(10)]
    model = folded(*before, frame(110.0), frame(111.0))
    assert (prompt_rate(model), decode_rate(model)) == (0.0, 0.0)


def test_a_lost_feed_keeps_what_was_known() -> None:
    model = folded(frame(100.0, 5), FeedLost("gone", 0.4))
    assert model.frame.at == 100.0
    assert (model.link.reason, model.link.retry_s) == ("gone", 0.4)


STEPS = st.lists(
    st.tuples(st.floats(0.01, 30), st.integers(0, 5000), st.integers(0, 500), st.booleans()),
    max_size=60,
)


@given(STEPS)
def test_history_is_bounded_and_never_negative(steps: list[tuple[float, int, int, bool]]) -> None:
    model = DashboardState()
    at = 1000.0
    n_prompt = 0
    n_generated = 0
    n_calls = 0
    for wait, prompt, generated, is_restart in steps:
        at += wait
        if is_restart:
            n_prompt = n_generated = n_calls = 0
        n_prompt = n_prompt + prompt
        n_generated = n_generated + generated
        n_calls = n_calls + 1
        model = reduce(model, frame(at, n_prompt, n_generated, n_calls))
        assert prompt_rate(model) >= -1e-6
        assert decode_rate(model) >= -1e-6
    assert len(model.samples) <= 2 * WINDOW_S + 8
    assert [m.time for m in model.samples] == sorted(m.time for m in model.samples)
    assert len(series(model, 17)) == 17
    for prompt_tps, decode_tps, _ in series(model, 17):
        assert (prompt_tps or 0) >= -1e-6
        assert (decode_tps or 0) >= -1e-6
