"""Models of a large disk, and two gateways of a home; `make soak` takes two thousand."""

from pathlib import Path

import pytest

from tests.endurance.many_models import many_models

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]


@pytest.mark.parametrize("n_models", [40, pytest.param(2000, marks=pytest.mark.soak)])
def test_all_models_of_a_disk_are_served_and_a_second_gateway_is_no_fault(
    tmp_path: Path, n_models: int
) -> None:
    assert many_models(tmp_path, n_models).n_models >= n_models
