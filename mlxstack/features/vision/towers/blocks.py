"""Parts of which the towers of all families are made.

Attributes are named as the tensors of a checkpoint, which `load_weights` reads.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

Rotation = tuple[mx.array, mx.array]
"""Cosines and sines (n, dim)."""

Linear = Callable[[int, int], Any]
"""Layer of these widths of input and output."""


class VisionBlock(nn.Module):  # type: ignore[misc]
    """Block of a tower: attention and MLP, each after a norm.

    All but the attention works by rows. `parts` are norm, attention, norm and MLP in this order,
    by their names in checkpoints.
    """

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self[name] = part

    def inputs(self, hidden: mx.array, beside: Any) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys, values (1, heads, n, dim) of hidden states (n, width)."""
        norm, attention, *_ = self.values()
        qkv: tuple[mx.array, mx.array, mx.array] = attention(norm(hidden), beside)
        return qkv

    def output(self, hidden: mx.array, attended: mx.array) -> mx.array:
        """Hidden states after the block, for some rows.

        `hidden` is (n, width), `attended` (n, heads * dim).
        """
        _, attention, norm, mlp = self.values()
        mixed = hidden + attention[attention.output](attended)
        states: mx.array = mixed + mlp(norm(mixed))
        return states


class VisionAttention(nn.Module):  # type: ignore[misc]
    """Projections of the attention.

    There are `n_heads` of `dim`, and `n_kv` of keys and values; `output` names the last projection.
    """

    def __init__(
        self, linear: Linear, width: int, dim: int, n_heads: int, n_kv: int, output: str = "o_proj"
    ) -> None:
        super().__init__()
        self.dim = dim
        self.output = output
        self.q_proj = linear(width, n_heads * dim)
        self.k_proj, self.v_proj = linear(width, n_kv * dim), linear(width, n_kv * dim)
        self[output] = linear(n_heads * dim, width)

    def __call__(
        self, hidden: mx.array, rope: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = (
            project(hidden).reshape(1, len(hidden), -1, self.dim).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rope is None:
            return (q, k, v)
        return (rotated(q, *rope), rotated(k, *rope), v)


class PlainMLP(nn.Module):  # type: ignore[misc]
    """Two layers of these names, and the tanh form of GELU between."""

    def __init__(self, width: int, inner: int, first: str, last: str) -> None:
        super().__init__()
        self[first] = nn.Linear(width, inner)
        self[last] = nn.Linear(inner, width)

    def __call__(self, hidden: mx.array) -> Any:
        first, last = self.values()
        return last(nn.gelu_approx(first(hidden)))


class GatedMLP(nn.Module):  # type: ignore[misc]
    """Gated layers."""

    def __init__(
        self, linear: Linear, width: int, inner: int, act: Callable[[mx.array], mx.array]
    ) -> None:
        super().__init__()
        self.act = act
        self.gate_proj = linear(width, inner)
        self.up_proj = linear(width, inner)
        self.down_proj = linear(inner, width)

    def __call__(self, hidden: mx.array) -> Any:
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotary embedding of two halves, in the precision of the angles."""
    half = x.shape[-1] // 2
    turned = mx.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return (x * cos + turned * sin).astype(x.dtype)


def rotation(angles: list[Any]) -> Rotation:
    """Rotation by NumPy angles (n, part of dim) each."""
    both = mx.array(np.concatenate(angles, axis=1).astype(np.float32))
    return mx.cos(both), mx.sin(both)


def patch_matrix(weight: mx.array) -> mx.array:
    """Patch convolution as a matrix over (channels, ..., rows, columns).

    PyTorch has the channels second, MLX has them last. Patches are squares.
    """
    is_last = weight.shape[-1] != weight.shape[-2]
    return (mx.moveaxis(weight, -1, 1) if is_last else weight).flatten(1)
