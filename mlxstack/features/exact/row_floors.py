"""Linear layers that pad their rows to counts with equal bits."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from msgspec import Struct

from mlxstack.core.exact_rows import LayerBits
from mlxstack.engine.model.pass_mode import current_mode
from mlxstack.features.exact.policy import HALF_TWELVES, RowRange, equal_range
from mlxstack.features.exact.row_padding import has_equal_bits, pad_rows, unpad_rows

ROW_COUNTS = (*range(1, 14), 16, 17, 24, 32, 33, 48, 64, 128)
"""Row counts of which the bits are compared."""
HEAD_COUNTS = (1, 2, 3, 5, 6, 8, 12, 13)
"""Those of heads, which compute no prompts."""
LINEAR = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
ROUTERS = ("gate", "router")
"""Last names of layers that choose experts."""


class ShapeBits(Struct, frozen=True):
    """Row counts with equal bits of all layers of a shape."""

    bits: LayerBits
    rows: RowRange | None
    """None: no two row counts have equal bits."""


class MeasuredLayer(Struct, frozen=True):
    """A layer of a model with its row counts of equal bits."""

    module: Any
    bits: LayerBits
    rows: RowRange | None


def measured_layers(
    model: Any, has_time: Callable[[], bool], known: Iterable[ShapeBits] = ()
) -> list[MeasuredLayer] | None:
    """Row counts of all linear layers by shape; None without time.

    `known` shapes are not measured again.
    """
    by_shape = {f"{shape.bits.kind} {shape.bits.shape}": shape for shape in known}
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, LINEAR + EXPERTS):
            continue
        is_head = name.endswith("lm_head")
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            if not _is_tied(model) or not name.endswith("embed_tokens"):
                continue
            is_head = True
        kind = _kind(name, module, is_head=is_head)
        key = f"{kind} {_shape(module)}"
        if key not in by_shape:
            if not has_time():
                return None
            by_shape[key] = _measured(kind, module)
        shape = by_shape[key]
        layers.append(MeasuredLayer(module, shape.bits, shape.rows))
    return layers


def shapes_of(layers: Iterable[MeasuredLayer]) -> tuple[ShapeBits, ...]:
    """Each shape of the layers once."""
    return tuple(dict.fromkeys(ShapeBits(layer.bits, layer.rows) for layer in layers))


def set_floors(layers: list[MeasuredLayer]) -> None:
    """Have these layers pad their rows in passes with equal bits."""
    for layer in layers:
        if layer.rows is None or layer.rows.floor == 1 or _is_experts(layer.module):
            continue
        if not hasattr(layer.module, "_equal_rows"):
            kind: Any = type(layer.module)
            layer.module.__class__ = _padding(kind)
        layer.module._equal_rows = layer.rows


def clear_floors(layers: list[MeasuredLayer]) -> None:
    """Make these layers again what they were."""
    for layer in layers:
        if hasattr(layer.module, "_equal_rows"):
            layer.module.__class__ = type(layer.module).__bases__[0]
            del layer.module._equal_rows


def _is_tied(model: Any) -> bool:
    return not any(name.endswith("lm_head") for name, _ in model.named_modules())


def _is_experts(module: Any) -> bool:
    return isinstance(module, EXPERTS)


def _kind(name: str, module: Any, *, is_head: bool) -> str:
    if is_head:
        return "head"
    if _is_experts(module):
        return "experts"
    if name.rsplit(".", 1)[-1] in ROUTERS:
        return "router"
    return "projection"


def _shape(module: Any) -> str:
    weight = module.weight
    bits = getattr(module, "bits", 0)
    n_inputs = weight.shape[-1] * 32 // bits if bits else weight.shape[-1]
    storage = f"{bits} bits" if bits else str(weight.dtype).removeprefix("mlx.core.")
    return f"{n_inputs} x {weight.shape[-2]}, {storage}"


def _measured(kind: str, module: Any) -> ShapeBits:
    n_inputs = int(_shape(module).split(" ")[0])
    dtype = module.scales.dtype if hasattr(module, "scales") else module.weight.dtype
    if _is_experts(module):
        found_range = _range_of_experts(module, n_inputs, dtype)
    else:
        row = mx.random.normal((n_inputs,), key=mx.random.key(0)).astype(dtype)
        product = getattr(module, "as_linear", module)
        counts = HEAD_COUNTS if kind == "head" else ROW_COUNTS
        found_range = _range_of_product(product, row, counts)
    floor = found_range.floor if found_range else 0
    ceiling = found_range.ceiling if found_range else 0
    return ShapeBits(LayerBits(kind, _shape(module), floor, ceiling), found_range)


def _range_of_experts(module: Any, n_inputs: int, dtype: mx.Dtype) -> RowRange | None:
    n_most = max(ROW_COUNTS)
    inputs = mx.random.normal((n_most, 1, 1, n_inputs), key=mx.random.key(0)).astype(dtype)
    chosen = (mx.arange(n_most) % module.weight.shape[0])[:, None]
    bits: list[tuple[int, int]] = []
    before: mx.array | None = None
    n_changes = 0
    for n in ROW_COUNTS:
        rows = module(inputs[:n], chosen[:n]).reshape(n, -1)
        # All rows that both have: the first one alone says nothing of other places.
        if before is not None and not mx.array_equal(rows[: before.shape[0]], before):
            n_changes += 1
        before = rows
        bits.append((n, n_changes))
    return equal_range(bits)


Outputs = mx.array | Sequence[mx.array]
"""Outputs of a layer; one that is several layers (afm7) has a list."""


def _joined(outputs: Outputs) -> mx.array:
    if isinstance(outputs, mx.array):
        return outputs
    return mx.concatenate(list(outputs), axis=-1)


def _range_of_product(
    product: Callable[[mx.array], Outputs], row: mx.array, counts: Sequence[int]
) -> RowRange | None:
    """Row counts with equal bits in all places."""
    bits: list[tuple[int, int]] = []
    before: mx.array | None = None
    for n in counts:
        rows = _joined(product(mx.broadcast_to(row, (n, row.shape[-1]))[:, None])).reshape(n, -1)
        in_all_places = mx.all(rows == rows[0]).item()
        is_as_before = before is not None and in_all_places and mx.array_equal(rows[0], before)
        bits.append((n, bits[-1][1] if is_as_before else len(bits)))
        before = rows[0] if in_all_places else None
    found_range = equal_range(bits)
    is_open = found_range is not None and not found_range.ceiling
    if not is_open and has_equal_bits(lambda x: _joined(product(x)), row, HALF_TWELVES, counts):
        return HALF_TWELVES
    return found_range


@cache
def _padding(kind: Any) -> type:
    """Subclass that pads its rows in passes with equal bits."""
    if issubclass(kind, nn.Embedding | nn.QuantizedEmbedding):

        class RowPaddingHead(kind):  # type: ignore[misc]
            """Embedding that computes logits of counts of rows in `_equal_rows`."""

            def as_linear(self, x: mx.array) -> Outputs:
                """Logits (..., vocabulary) of states (..., dim)."""
                return _padded(super().as_linear, x, self._equal_rows)

        return RowPaddingHead

    class RowPaddingLinear(kind):  # type: ignore[misc]
        """Linear layer that computes counts of rows in `_equal_rows`."""

        def __call__(self, x: mx.array) -> Outputs:
            """Outputs (..., out) of inputs (..., in)."""
            return _padded(super().__call__, x, self._equal_rows)

    return RowPaddingLinear


def _padded(product: Callable[[mx.array], Outputs], x: mx.array, rows: RowRange) -> Outputs:
    width = x.shape[-1]
    n = x.size // width
    if rows.padded(n) == n or current_mode() is None:
        return product(x)
    outputs = product(pad_rows(x.reshape(n, width), rows))
    if isinstance(outputs, mx.array):
        return unpad_rows(outputs, rows, n).reshape(*x.shape[:-1], -1)
    return [unpad_rows(part, rows, n).reshape(*x.shape[:-1], -1) for part in outputs]
