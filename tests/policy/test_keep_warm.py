"""Keep-warm passes: never beside requests, never without power, spaced, and they end."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from mlxstack.policy.keep_warm import INTERVAL_S, IdleState, seconds_to_pass

KEEP_WARM_S = 60.0
times = st.floats(0, 200)
states = st.builds(
    IdleState,
    now=times,
    answered_at=st.none() | times,
    passed_at=st.none() | times,
    is_busy=st.booleans(),
    is_powered=st.booleans(),
)


class Stretch(Struct, frozen=True):
    """Part of a time line: seconds of a request or of idleness."""

    seconds: float
    is_request: bool
    is_powered: bool


stretches = st.lists(
    st.builds(Stretch, st.floats(0.1, 100), st.booleans(), st.booleans()), max_size=8
)


def passes(line: list[Stretch], pass_s: float, keep_warm_s: float) -> list[tuple[float, IdleState]]:
    """Begin of each pass of a time line, with the state that decided it."""
    now = 0.0
    answered_at = None
    passed_at = None
    made = []
    for part in line:
        end = now + part.seconds
        while now < end:
            state = IdleState(now, answered_at, passed_at, part.is_request, part.is_powered)
            wait_s = seconds_to_pass(state, keep_warm_s)
            if wait_s == 0:
                made.append((now, state))
                now += pass_s
                passed_at = now
            else:
                now = end if wait_s is None else now + max(wait_s, 1e-6)
        if part.is_request:
            answered_at = now
    return made


@given(states, st.floats(0, 120))
def test_nothing_is_computed_beside_a_request_or_before_the_first(
    state: IdleState, keep_warm_s: float
) -> None:
    wait_s = seconds_to_pass(state, keep_warm_s)
    if state.is_busy or state.answered_at is None or not keep_warm_s:
        assert wait_s is None
    assert wait_s is None or wait_s >= 0


@given(stretches, st.floats(0.001, 3), st.floats(0, 120))
def test_passes_of_any_time_line_are_powered_spaced_and_end(
    line: list[Stretch], pass_s: float, keep_warm_s: float
) -> None:
    last = None
    for began, state in passes(line, pass_s, keep_warm_s):
        assert state.is_powered and not state.is_busy
        assert state.answered_at is not None
        assert state.answered_at + INTERVAL_S <= began + 1e-6
        assert began < state.answered_at + keep_warm_s
        assert last is None or began >= last + pass_s + INTERVAL_S - 1e-6
        last = began


def test_an_idle_minute_after_a_request_gets_its_passes_and_no_more() -> None:
    line = [Stretch(1, is_request=True, is_powered=True), Stretch(600, False, True)]
    made = [began for began, _ in passes(line, 0.02, KEEP_WARM_S)]
    assert len(made) == int(KEEP_WARM_S / (INTERVAL_S + 0.02))
    assert made[-1] < 1 + KEEP_WARM_S


def test_power_that_comes_back_is_used_within_an_interval() -> None:
    line = [
        Stretch(1, is_request=True, is_powered=True),
        Stretch(10, is_request=False, is_powered=False),
        Stretch(10, is_request=False, is_powered=True),
    ]
    first = passes(line, 0.02, KEEP_WARM_S)[0][0]
    assert 11 <= first <= 11 + INTERVAL_S
