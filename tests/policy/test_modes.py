"""J2: what a switch of modes stops, starts and leaves alone."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.control.mode_switch import difference

NAMES = st.sampled_from("abcdef")


def test_j2_only_what_differs_is_touched() -> None:
    running = {"old": True, "same": True, "stale": False}
    change = difference(running, ["same", "stale", "new"])
    assert change.keep == ("same",)
    assert change.stop == ("old", "stale")
    assert change.start == ("stale", "new")


@given(running=st.dictionaries(NAMES, st.booleans()), wanted=st.lists(NAMES, unique=True))
def test_j2_afterwards_exactly_the_wanted_run(running: dict[str, bool], wanted: list[str]) -> None:
    change = difference(running, wanted)
    after = (set(running) - set(change.stop)) | set(change.start)
    assert after == set(wanted)
    assert not set(change.start) & (set(running) - set(change.stop))
    assert all(running[name] for name in change.keep)
