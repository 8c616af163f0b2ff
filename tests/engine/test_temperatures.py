"""A temperature of any size draws tokens of the distribution that it makes."""

import mlx.core as mx
import pytest

from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.sampler import Sampler, sample_rows

pytestmark = pytest.mark.mlx
LOGITS = mx.array([[0.5, 3.0, -1.0, 2.5, -mx.inf, -mx.inf, -mx.inf, -mx.inf]])


def drawn(temperature: float, n: int = 60) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=7), [1], 0)
    tokens = []
    for _ in range(n):
        (choices,) = sample_rows([sampler], LOGITS)
        assert isinstance(choices, tuple)
        (sampled,) = choices
        tokens.append(int(sampled[0].item()))
    return tokens


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-40, 9e-7, 1e-6])
def test_just_above_zero_takes_the_likeliest_token(temperature: float) -> None:
    assert set(drawn(temperature)) == {1}


def test_below_the_least_temperature_sampling_is_greedy() -> None:
    assert Sampler(SamplingParams(temperature=1e-40), [1], 0).draw_rules.temperature == 0
    assert Sampler(SamplingParams(temperature=1e-6), [1], 0).draw_rules.temperature > 0


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1e300])
def test_the_highest_draw_evenly_of_what_is_allowed(temperature: float) -> None:
    assert set(drawn(temperature)) == {0, 1, 2, 3}
