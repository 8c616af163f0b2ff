"""A slice of the floods of odd pictures; `make soak` sends them all."""

from pathlib import Path

import pytest

from tests.endurance.odd_pictures import PICTURES
from tests.endurance.picture_floods import bodies_of, floods, picture_floods

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]
SLICE = frozenset(
    {"png", "png: exif many tags", "png: 1 x 40000", "jpeg: 5,000 scans", "gif: 20,000 frames"}
)


def test_odd_pictures_are_answered_in_words_beside_a_plain_chat(tmp_path: Path) -> None:
    outcome = picture_floods(tmp_path, bodies_of(SLICE))
    assert (outcome.n_ok, outcome.n_refused) == (3, 2)
    assert outcome.n_plain


@pytest.mark.soak
def test_floods_of_pictures_are_answered_in_words_beside_a_plain_chat(tmp_path: Path) -> None:
    bodies = {**bodies_of(), **floods()}
    outcome = picture_floods(tmp_path, bodies)
    assert outcome.n_ok + outcome.n_refused == len(bodies) > len(PICTURES)
