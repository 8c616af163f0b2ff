"""Pixtral's vision tower with the projector of Mistral 3.

Transformers, modeling_pixtral.py and modeling_mistral3.py: https://github.com/huggingface/transformers
"""

from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.towers.blocks import GatedMLP, VisionAttention, VisionBlock, rotation
from mlxstack.features.vision.towers.tower import VisionTower

EPS = 1e-5


class TextSizes(Struct, frozen=True):
    """Text model's part of the projector."""

    hidden_size: int
    rms_norm_eps: float = 1e-5


class RopeParameters(Struct, frozen=True):
    """Rotation, as newer configurations write it."""

    rope_theta: float = 10000.0


class PixtralVision(Struct, frozen=True):
    """`vision_config`, and what config.json says of the projector."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    text_config: TextSizes
    patch_size: int = 14
    num_channels: int = 3
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    hidden_act: Literal["silu", "gelu"] = "silu"
    spatial_merge_size: int = 2
    multimodal_projector_bias: bool = False
    vision_feature_layer: Literal[-1] = -1


class PixtralProjector(nn.Module):  # type: ignore[misc]
    """Features of the text model from `merge` x `merge` patches, channels first."""

    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        n = config.text_config.hidden_size
        bias = config.multimodal_projector_bias
        width = config.hidden_size
        self.merge = config.spatial_merge_size
        self.norm = nn.RMSNorm(width, eps=config.text_config.rms_norm_eps)
        merging = nn.Linear(width * self.merge**2, width, bias=False)
        self.patch_merger = {"merging_layer": merging}
        self.linear_1 = nn.Linear(width, n, bias=bias)
        self.linear_2 = nn.Linear(n, n, bias=bias)

    def __call__(self, hidden: mx.array, size: ImageSize) -> Any:
        grid = self.norm(hidden).reshape(size.rows, self.merge, size.columns, self.merge, -1)
        parts = grid.transpose(0, 2, 4, 1, 3).reshape(size.n_features, -1)
        merged = self.patch_merger["merging_layer"](parts)
        return self.linear_2(nn.gelu(self.linear_1(merged)))


class PixtralTower(VisionTower):
    """Patches of an image by rows to features."""

    patches = "patch_conv.weight"

    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.config = config
        n = config.num_channels * config.patch_size**2
        self.patch_conv = nn.Linear(n, config.hidden_size, bias=False)
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=EPS)
        self.transformer = {"layers": [_block(config) for _ in range(config.num_hidden_layers)]}
        self.multi_modal_projector = PixtralProjector(config)

    @property
    def sequence(self) -> list[VisionBlock]:
        """Blocks in order."""
        return list(self.transformer["layers"])

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Patches, and cosines and sines of the rotation."""
        hidden = self.ln_pre(self.patch_conv(pixels.astype(self.ln_pre.weight.dtype)))
        config = self.config
        merge = self.config.spatial_merge_size
        head = config.head_dim or config.hidden_size // config.num_attention_heads
        base = config.rope_theta or (config.rope_parameters or RopeParameters()).rope_theta
        steps = base ** -(np.arange(0, head, 2, dtype=np.float32) / head)
        rows, columns = np.indices((size.rows * merge, size.columns * merge)).reshape(2, -1)
        angles = [np.outer(rows, steps[::2]), np.outer(columns, steps[1::2])]
        return hidden, rotation(angles * 2)

    def leave(self, hidden: mx.array, size: ImageSize) -> mx.array:
        """Merged and projected patches."""
        features: mx.array = self.multi_modal_projector(hidden, size)
        return features


def _block(config: PixtralVision) -> VisionBlock:
    n = config.hidden_size
    n_heads = config.num_attention_heads
    linear = partial(nn.Linear, bias=False)
    act = nn.silu if config.hidden_act == "silu" else nn.gelu
    return VisionBlock(
        attention_norm=nn.RMSNorm(n, eps=EPS),
        attention=VisionAttention(linear, n, n // n_heads, n_heads, n_heads),
        ffn_norm=nn.RMSNorm(n, eps=EPS),
        feed_forward=GatedMLP(linear, n, config.intermediate_size, act),
    )
