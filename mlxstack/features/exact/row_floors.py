"""Linear layers that pad their rows to counts with equal bits."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from msgspec import Struct

from mlxstack.core.exact_rows import LayerBits
from mlxstack.engine.model.pass_mode import current_mode
from mlxstack.features.exact.policy import RowRange, equal_range

ROW_COUNTS = (*range(1, 14), 16, 17, 24, 32, 33, 48, 64, 128)
"""Row counts of which the bits are compared."""
HEAD_COUNTS = (1, 2, 3, 5, 6, 8, 12, 13)
"""Those of heads, which compute no prompts."""
LINEAR = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
ROUTERS = ("gate", "router")
"""Last names of layers that choose experts."""


class MeasuredLayer(Struct, frozen=True):
    """A layer of a model with its row counts of equal bits."""

    module: Any
    bits: LayerBits
    rows: RowRange | None


def measured_layers(model: Any, has_time: Callable[[], bool]) -> list[MeasuredLayer] | None:
    """Row counts of all linear layers by shape; None without time."""
    by_shape: dict[str, tuple[LayerBits, RowRange | None]] = {}
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
        layers.append(MeasuredLayer(module, *by_shape[key]))
    return layers


def set_floors(layers: list[MeasuredLayer]) -> None:
    """Have these layers pad their rows in passes with equal bits."""
    for layer in layers:
        if layer.rows is None or layer.rows.floor == 1 or _is_experts(layer.module):
            continue
        if not hasattr(layer.module, "_row_floor"):
            kind: Any = type(layer.module)
            layer.module.__class__ = _floored(kind)
        layer.module._row_floor = layer.rows.floor


def clear_floors(layers: list[MeasuredLayer]) -> None:
    """Make these layers again what they were."""
    for layer in layers:
        if hasattr(layer.module, "_row_floor"):
            layer.module.__class__ = type(layer.module).__bases__[0]
            del layer.module._row_floor


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


def _measured(kind: str, module: Any) -> tuple[LayerBits, RowRange | None]:
    n_inputs = int(_shape(module).split(" ")[0])
    dtype = module.scales.dtype if hasattr(module, "scales") else module.weight.dtype
    n_most = max(ROW_COUNTS)
    inputs = mx.random.normal((n_most, n_inputs), key=mx.random.key(0)).astype(dtype)
    if _is_experts(module):
        chosen = (mx.arange(n_most) % module.weight.shape[0])[:, None]
        pairs = inputs[:, None, None]

        def compute(n: int) -> mx.array:
            rows: mx.array = module(pairs[:n], chosen[:n])
            return rows.reshape(n, -1)
    else:
        product = getattr(module, "as_linear", module)

        def compute(n: int) -> mx.array:
            rows: mx.array = product(inputs[:n, None])
            return rows.reshape(n, -1)

    bits: list[tuple[int, int]] = []
    before: mx.array | None = None
    n_changes = 0
    for n in HEAD_COUNTS if kind == "head" else ROW_COUNTS:
        rows = compute(n)
        mx.eval(rows)
        # All rows that both have: the first one alone says nothing of other places.
        if before is not None and not mx.array_equal(rows[: before.shape[0]], before):
            n_changes += 1
        before = rows
        bits.append((n, n_changes))
    found_range = equal_range(bits)
    floor = found_range.floor if found_range else 0
    ceiling = found_range.ceiling if found_range else 0
    return LayerBits(kind, _shape(module), floor, ceiling), found_range


@cache
def _floored(kind: Any) -> type:
    """Subclass that pads its rows in passes with equal bits."""
    if issubclass(kind, nn.Embedding | nn.QuantizedEmbedding):

        class RowFloorHead(kind):  # type: ignore[misc]
            """Embedding that computes at least `_row_floor` rows of logits."""

            def as_linear(self, x: mx.array) -> mx.array:
                """Logits (..., vocabulary) of states (..., dim)."""
                return _padded(super().as_linear, x, self._row_floor)

        return RowFloorHead

    class RowFloorLinear(kind):  # type: ignore[misc]
        """Linear layer that computes at least `_row_floor` rows."""

        def __call__(self, x: mx.array) -> mx.array:
            """Outputs (..., out) of inputs (..., in)."""
            return _padded(super().__call__, x, self._row_floor)

    return RowFloorLinear


def _padded(product: Callable[[mx.array], mx.array], x: mx.array, floor: int) -> mx.array:
    width = x.shape[-1]
    n = x.size // width
    if n >= floor or current_mode() is None:
        return product(x)
    rows = mx.pad(x.reshape(n, width), [(0, floor - n), (0, 0)])
    return product(rows)[:n].reshape(*x.shape[:-1], -1)
