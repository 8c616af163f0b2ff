"""Rules of any size draw tokens of the distribution that they make."""

from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.sampler import Sampler, sample_rows

pytestmark = pytest.mark.mlx
LOGITS = mx.array([[0.5, 3.0, -1.0, 2.5, -mx.inf, -mx.inf, -mx.inf, -mx.inf]])


def drawn(temperature: float, n: int = 60, **more: Any) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=7, **more), [1], 0)
    tokens = []
    for _ in range(n):
        (choices,) = sample_rows([sampler], LOGITS)
        assert isinstance(choices, tuple)
        (sampled,) = choices
        tokens.append(int(sampled.token.item().real))
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


@pytest.mark.parametrize("bias", [1e15, 3.4e38, 1e39, 1e308])
def test_a_bias_of_any_size_chooses_its_token(bias: float) -> None:
    assert set(drawn(0.8, logit_bias=((3, bias),))) == {3}


def test_the_least_bias_forbids_its_token() -> None:
    assert set(drawn(0.8, logit_bias=((1, -1e308),))) == {0, 2, 3}


@pytest.mark.parametrize("size", [1e38, 1e39, 1e308])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_any_size_move_what_was_said(name: str, size: float) -> None:
    assert set(drawn(0.8, **{name: -size})) == {1}
    assert sorted(drawn(0.8, 3, **{name: size})) == [0, 2, 3]


@pytest.mark.parametrize("factor", [1e-320, 1e-40, 1e-15])
def test_a_repetition_penalty_of_any_size_repeats(factor: float) -> None:
    assert set(drawn(0.8, repetition_penalty=factor)) == {1}
