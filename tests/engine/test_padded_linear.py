"""Linear layers with padded rows: same outputs, same parameters, and only where it saves time."""

import mlx.core as mx
import pytest
from mlx import nn

from mlxstack.engine.model import padded_linear
from mlxstack.engine.model.padded_linear import (
    MAX_ROWS,
    PaddedLinear,
    measured_seconds,
    pad_linear_layers,
)
from mlxstack.policy.row_padding import padded_counts
from tests.tolerance import ROUNDING, distance

pytestmark = pytest.mark.mlx

BY_FOUR = tuple(n if n < 2 else -(-n // 4) * 4 for n in range(17))


class Block(nn.Module):
    """Two layers of one input, one of their product, and one that is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 48, bias=False)
        self.up = nn.Linear(32, 48)
        self.layers = [nn.Linear(48, 64)]
        self.head = nn.QuantizedLinear(64, 64)

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(self.layers[0](self.gate(x) * self.up(x)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5), (2, 3), (8, 1), (4, 4), (20, 1)])
def test_outputs_are_those_of_the_layer(shape: tuple[int, int], has_bias: bool) -> None:
    linear = nn.Linear(32, 48, bias=has_bias)
    x = mx.random.normal((*shape, 32))
    output = PaddedLinear(linear, BY_FOUR, mx.zeros((3, 32)))(x)
    assert output.shape == (*shape, 48)
    assert distance(output, linear(x)) <= ROUNDING


def test_the_large_float_layers_of_a_model_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    x = mx.random.normal((5, 1, 32))
    expected = block(x)
    names = [name for name, _ in block.named_modules()]
    monkeypatch.setattr(padded_linear, "MIN_WEIGHTS", 32 * 48 + 1)
    pad_linear_layers(block)
    assert [type(one) for one in (block.gate, block.up)] == [nn.Linear] * 2
    assert isinstance(block.layers[0], PaddedLinear)
    assert isinstance(block.head, nn.QuantizedLinear)
    assert [name for name, _ in block.named_modules()] == names
    assert distance(block(x), expected) <= ROUNDING


def test_a_model_stays_as_it_is_where_padding_saves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Block()
    monkeypatch.setattr(
        padded_linear, "measured_seconds", lambda layers: [float(n) for n in range(9)]
    )
    pad_linear_layers(block)
    assert type(block.layers[0]) is nn.Linear


def test_slow_products_are_measured_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_linear, "MAX_S", 0.0)
    assert not padded_counts(measured_seconds([nn.Linear(32, 32)]))


def test_every_count_is_measured() -> None:
    seconds = measured_seconds([nn.Linear(32, 32), nn.Linear(32, 32)])
    assert len(seconds) == MAX_ROWS + 1
    assert min(seconds[1:]) > 0
