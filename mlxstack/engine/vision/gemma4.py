"""Vision tower of Gemma 4.

Transformers, modeling_gemma4.py: https://github.com/huggingface/transformers
"""

from collections.abc import Iterable
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import ImageSize
from mlxstack.engine.vision.gemma3 import TextWidth
from mlxstack.engine.vision.tower import (
    Rotation,
    VisionBlock,
    VisionLayers,
    VisionTower,
    projected,
    rotated,
)

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class AxialRope(Struct, frozen=True):
    """Rotation by column and by row."""

    rope_theta: float = 100.0


class Gemma4Vision(Struct, frozen=True):
    """`vision_config`, and the text model's part of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    text_config: TextWidth
    num_key_value_heads: int | None = None
    head_dim: int = 64
    patch_size: int = 16
    pooling_kernel_size: int = 3
    position_embedding_size: int = 10240
    rms_norm_eps: float = 1e-6
    rope_parameters: AxialRope = AxialRope()
    use_clipped_linears: bool = False
    standardize: bool = False
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class ClippedLinear(nn.Module):  # type: ignore[misc]
    """Matrix, with bounds of its input and output if any."""

    def __init__(self, config: Gemma4Vision, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=False)
        self.is_clipped = config.use_clipped_linears
        if self.is_clipped:
            self.input_min = self.output_min = mx.array(-np.inf)
            self.input_max = self.output_max = mx.array(np.inf)

    def __call__(self, x: mx.array) -> Any:
        if not self.is_clipped:
            return self.linear(x)
        inside = mx.clip(x, self.input_min, self.input_max)
        return mx.clip(self.linear(inside), self.output_min, self.output_max)


class Gemma4Attention(nn.Module):  # type: ignore[misc]
    """Projections of the attention, normed, with a rotation of each half."""

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.head, self.eps = config.head_dim, config.rms_norm_eps
        n, out = config.hidden_size, config.num_attention_heads * config.head_dim
        n_keys = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
        self.q_proj = ClippedLinear(config, n, out)
        self.k_proj = ClippedLinear(config, n, n_keys)
        self.v_proj = ClippedLinear(config, n, n_keys)
        self.o_proj = ClippedLinear(config, out, n)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def __call__(self, hidden: mx.array, rope: Rotation) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = projected(self, hidden, -1, self.head)
        q, k = _turned(self.q_norm(q), *rope), _turned(self.k_norm(k), *rope)
        return q, k, mx.fast.rms_norm(v, None, self.eps)


class Gemma4MLP(nn.Module):  # type: ignore[misc]
    """Gated layers."""

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        n, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = ClippedLinear(config, n, wide)
        self.up_proj = ClippedLinear(config, n, wide)
        self.down_proj = ClippedLinear(config, wide, n)

    def __call__(self, hidden: mx.array) -> Any:
        return self.down_proj(nn.gelu_approx(self.gate_proj(hidden)) * self.up_proj(hidden))


class Gemma4Block(VisionBlock):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        n, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(n, eps=eps)
        self.self_attn = Gemma4Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(n, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(n, eps=eps)
        self.mlp = Gemma4MLP(config)
        self.post_feedforward_layernorm = nn.RMSNorm(n, eps=eps)

    def inputs(self, hidden: mx.array, beside: Rotation) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated queries and keys, and values."""
        return self.self_attn(self.input_layernorm(hidden), beside)

    def output(self, hidden: mx.array, attended: mx.array) -> mx.array:
        """Hidden states with both sums."""
        mixed = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended))
        wide = self.mlp(self.pre_feedforward_layernorm(mixed))
        states: mx.array = mixed + self.post_feedforward_layernorm(wide)
        return states


class Gemma4Patches(nn.Module):  # type: ignore[misc]
    """Patch matrix and positions, learned by column and by row."""

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        n, n_positions = config.hidden_size, config.position_embedding_size
        self.input_proj = nn.Linear(3 * config.patch_size**2, n, bias=False)
        self.position_embedding_table = mx.zeros((2, n_positions, n))

    def __call__(self, pixels: mx.array, rows: mx.array, columns: mx.array) -> Any:
        by_column, by_row = self.position_embedding_table
        patches = self.input_proj(pixels.astype(by_row.dtype))
        return patches + by_column[columns] + by_row[rows]


class Gemma4Projector(nn.Module):  # type: ignore[misc]
    """Features of the text model.

    They are divided by the scale of embeddings, which the text model applies to all.
    """

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        n = config.text_config.hidden_size
        self.eps, self.embedding_scale = config.rms_norm_eps, n**0.5
        self.embedding_projection = nn.Linear(config.hidden_size, n, bias=False)

    def __call__(self, hidden: mx.array) -> Any:
        normed = mx.fast.rms_norm(hidden, None, self.eps)
        return self.embedding_projection(normed) / self.embedding_scale


class Gemma4Tower(VisionTower):
    """Patches of an image by rows to features."""

    is_scaled = False

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = Gemma4Patches(config)
        blocks = [Gemma4Block(config) for _ in range(config.num_hidden_layers)]
        self.encoder = VisionLayers(blocks)
        if config.standardize:
            self.std_bias = mx.zeros((config.hidden_size,))
            self.std_scale = mx.ones((config.hidden_size,))
        self.embed_vision = Gemma4Projector(config)

    @property
    def sequence(self) -> list[VisionBlock]:
        """Blocks in order."""
        return list(self.encoder.layers)

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Patches with their positions, and cosines and sines of the rotation.

        The first half of a head rotates by column, the second by row.
        """
        pool, half = self.config.pooling_kernel_size, self.config.head_dim // 2
        rows, columns = np.indices((size.rows * pool, size.columns * pool)).reshape(2, -1)
        exponents = np.arange(0, half, 2, dtype=np.float32) / half
        steps = self.config.rope_parameters.rope_theta**-exponents
        angles = [np.outer(at, steps) for at in (columns, columns, rows, rows)]
        both = mx.array(np.concatenate(angles, axis=1).astype(np.float32))
        hidden = self.patch_embedder(pixels, mx.array(rows), mx.array(columns))
        return hidden, (mx.cos(both), mx.sin(both))

    def leave(self, hidden: mx.array, size: ImageSize) -> mx.array:
        """Means of squares of patches, standardized and projected."""
        pool = self.config.pooling_kernel_size
        # In float32: the means are scaled beyond the range of float16.
        grid = hidden.astype(mx.float32).reshape(size.rows, pool, size.columns, pool, -1)
        pooled = grid.mean((1, 3)).reshape(size.n_features, -1) * self.config.hidden_size**0.5
        if self.config.standardize:
            bias, scale = (a.astype(mx.float32) for a in (self.std_bias, self.std_scale))
            pooled = (pooled - bias) * scale
        features: mx.array = self.embed_vision(pooled.astype(hidden.dtype))
        return features


def named(weights: Iterable[tuple[str, mx.array]], config: Gemma4Vision) -> dict[str, mx.array]:
    """Weights as `Gemma4Tower` names them, without bounds that are off."""
    found = {name.removeprefix("vision_tower."): array for name, array in weights}
    if config.use_clipped_linears:
        return found
    return {name: array for name, array in found.items() if not name.endswith(BOUNDS)}


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotation of both halves of each head (..., dim)."""
    parts = zip(*(mx.split(array, 2, axis=-1) for array in (x, cos, sin)), strict=True)
    return mx.concatenate([rotated(*part) for part in parts], axis=-1)
