"""A slice of the forged files; `make soak` runs more of them."""

from pathlib import Path

import pytest

from tests.conftest import ModelOf
from tests.endurance.forged import FORGERIES, Forger, forged
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.slow]
KINDS = ("tiny", "tiny-hybrid")
SLICE = {"other_type", "other_shape", "other_layout", "other_range"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [*sorted(SLICE), *in_soak(*(f.__name__ for f in FORGERIES if f.__name__ not in SLICE))]
)
def test_whole_and_false_kv_is_not_used(
    model_of: ModelOf, tmp_path: Path, kind: str, name: str
) -> None:
    forgery = next(candidate for candidate in FORGERIES if candidate.__name__ == name)
    forger = Forger(model_of(kind), tmp_path, seed=2)
    forger.round(forgery)
    assert forger.outcome.n_forged
    assert forger.outcome.n_compared == 3


@pytest.mark.parametrize("kind", in_soak(*KINDS))
def test_whole_and_false_kv_of_many_rounds_is_not_used(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    outcome = forged(model_of(kind), tmp_path, seed=1, n_rounds=4 * len(FORGERIES))
    assert outcome.n_forged > 50
    assert outcome.n_refused
    assert outcome.n_restored
