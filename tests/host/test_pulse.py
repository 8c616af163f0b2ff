"""A9: which looks at a worker mean that it is stuck."""

import pytest

from mlxstack.host.pulse import Beat, Pulse
from mlxstack.host.state import Patience

PATIENCE = Patience(look_s=5.0, silent_s=20.0, stuck_s=40.0)
WELL = Beat(is_well=True, said="")
LOADING = Beat(is_well=True, said="Loading model")
STALLED = Beat(said="the engine has work but finishes no turn")
SILENT = Beat()


def felt(*beats: Beat) -> list[str | None]:
    pulse = Pulse(PATIENCE)
    return [pulse.feel(beat) for beat in beats]


def test_a9_loading_may_last() -> None:
    assert set(felt(*[LOADING] * 500)) == {None}


@pytest.mark.parametrize("first", [WELL, LOADING, STALLED])
def test_a9_silence_after_a_word_is_the_end(first: Beat) -> None:
    assert felt(first, *[SILENT] * 4) == [None] * 4 + ["has not answered for 20 s"]


def test_a9_one_answer_breaks_a_silence() -> None:
    assert set(felt(WELL, *[SILENT] * 3, WELL, *[SILENT] * 3, STALLED)) == {None}


def test_a9_at_first_silence_may_last_longer() -> None:
    found = felt(*[SILENT] * 8)
    assert found == [None] * 7 + ["has not been healthy for 40 s and has not answered"]


def test_a9_a_stalled_engine_has_the_time_to_recover() -> None:
    assert set(felt(WELL, *[STALLED] * 7, WELL, *[STALLED] * 7)) == {None}
    assert felt(*[STALLED] * 8)[-1] == (
        "has not been healthy for 40 s and says `the engine has work but finishes no turn`"
    )


def test_a9_silence_and_complaints_add_up() -> None:
    assert felt(WELL, *[STALLED, SILENT] * 4)[-1] is not None
