"""Vision tower of Gemma 4.

Transformers, modeling_gemma4.py: https://github.com/huggingface/transformers
"""

from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.towers.blocks import (
    GatedMLP,
    Linear,
    Rotation,
    VisionAttention,
    VisionBlock,
    rotated,
    rotation,
)
from mlxstack.features.vision.towers.gemma3 import TextWidth
from mlxstack.features.vision.towers.tower import VisionTower

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


class Gemma4Attention(VisionAttention):
    """Projections of the attention, normed, with a rotation of each half."""

    def __init__(self, config: Gemma4Vision, linear: Linear) -> None:
        dim = config.head_dim
        n_heads = config.num_attention_heads
        n_kv = config.num_key_value_heads or n_heads
        super().__init__(linear, config.hidden_size, dim, n_heads, n_kv)
        self.eps = config.rms_norm_eps
        self.q_norm = nn.RMSNorm(dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(dim, eps=self.eps)

    def __call__(
        self, hidden: mx.array, rope: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        assert rope is not None
        q, k, v = super().__call__(hidden, None)
        q = _turned(self.q_norm(q), *rope)
        k = _turned(self.k_norm(k), *rope)
        return q, k, mx.fast.rms_norm(v, None, self.eps)


class Gemma4Block(VisionBlock):
    """Attention and MLP, each between two norms; the second ones come last."""

    def output(self, hidden: mx.array, attended: mx.array) -> mx.array:
        """Hidden states with both sums."""
        _, attention, norm, mlp, after_attention, after_mlp = self.values()
        mixed = hidden + after_attention(attention.o_proj(attended))
        states: mx.array = mixed + after_mlp(mlp(norm(mixed)))
        return states


class Gemma4Projector(nn.Module):  # type: ignore[misc]
    """Features of the text model.

    They are divided by the scale of embeddings, which the text model applies to all.
    """

    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        n = config.text_config.hidden_size
        self.eps = config.rms_norm_eps
        self.embedding_scale = n**0.5
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
        n = config.hidden_size
        self.patch_embedder = {
            "input_proj": nn.Linear(3 * config.patch_size**2, n, bias=False),
            "position_embedding_table": mx.zeros((2, config.position_embedding_size, n)),
        }
        self.encoder = {"layers": [_block(config) for _ in range(config.num_hidden_layers)]}
        if config.standardize:
            self.std_bias, self.std_scale = mx.zeros((n,)), mx.ones((n,))
        self.embed_vision = Gemma4Projector(config)

    def arranged(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Without bounds that are off."""
        if self.config.use_clipped_linears:
            return weights
        return {name: array for name, array in weights.items() if not name.endswith(BOUNDS)}

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Patches with their positions, and cosines and sines of the rotation.

        The first half of a head rotates by column, the second by row.
        """
        pool = self.config.pooling_kernel_size
        half = self.config.head_dim // 2
        rows, columns = np.indices((size.rows * pool, size.columns * pool)).reshape(2, -1)
        exponents = np.arange(0, half, 2, dtype=np.float32) / half
        steps = self.config.rope_parameters.rope_theta**-exponents
        angles = [np.outer(coordinates, steps) for coordinates in (columns, columns, rows, rows)]
        matrix, (by_column, by_row) = self.patch_embedder.values()
        patches = matrix(pixels.astype(by_row.dtype))
        return patches + by_column[mx.array(columns)] + by_row[mx.array(rows)], rotation(angles)

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


def _block(config: Gemma4Vision) -> VisionBlock:
    def norm() -> nn.RMSNorm:
        return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    linear = partial(ClippedLinear, config)
    return Gemma4Block(
        input_layernorm=norm(),
        self_attn=Gemma4Attention(config, linear),
        pre_feedforward_layernorm=norm(),
        mlp=GatedMLP(linear, config.hidden_size, config.intermediate_size, nn.gelu_approx),
        post_attention_layernorm=norm(),
        post_feedforward_layernorm=norm(),
    )


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotation of both halves of each head (..., dim)."""
    parts = zip(*(mx.split(array, 2, axis=-1) for array in (x, cos, sin)), strict=True)
    return mx.concatenate([rotated(*part) for part in parts], axis=-1)
