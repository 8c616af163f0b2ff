"""A slice of what time tells across salts: the tokens that are found again."""

from pathlib import Path

import pytest

from tests.endurance.salt_timing import salt_timing


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.net
def test_a_prompt_of_another_salt_shortens_nothing(tmp_path: Path) -> None:
    timing = salt_timing(tmp_path, n_rounds=2)
    assert timing.n_own > 2000
    assert timing.n_others == 0
