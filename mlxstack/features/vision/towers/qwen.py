"""Vision tower of Qwen3-VL and Qwen3.5 to 3.8.

Transformers, modeling_qwen3_vl.py: https://github.com/huggingface/transformers
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.towers.blocks import (
    PlainMLP,
    Rotation,
    VisionBlock,
    rotated,
    rotation,
)
from mlxstack.features.vision.towers.tower import VisionTower

EPS = 1e-6
ROPE_BASE = 10000.0


class QwenVision(Struct, frozen=True):
    """`vision_config` of a checkpoint."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    deepstack_visual_indexes: tuple[int, ...] = ()


class QwenAttention(nn.Module):  # type: ignore[misc]
    """Projections of the attention, with a rotation of two halves."""

    output = "proj"

    def __init__(self, config: QwenVision) -> None:
        super().__init__()
        self.n_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def __call__(self, hidden: mx.array, rope: Rotation) -> tuple[mx.array, mx.array, mx.array]:
        qkv = self.qkv(hidden).reshape(len(hidden), 3, self.n_heads, -1).transpose(1, 2, 0, 3)
        return rotated(qkv[0:1], *rope), rotated(qkv[1:2], *rope), qkv[2:3]


class QwenMerger(nn.Module):  # type: ignore[misc]
    """Features of the text model from `merge` x `merge` patches each."""

    def __init__(self, config: QwenVision, norms_merged: bool) -> None:
        super().__init__()
        self.n_merged = config.hidden_size * config.spatial_merge_size**2
        self.norms_merged = norms_merged
        self.norm = nn.LayerNorm(self.n_merged if norms_merged else config.hidden_size, eps=EPS)
        self.linear_fc1 = nn.Linear(self.n_merged, self.n_merged)
        self.linear_fc2 = nn.Linear(self.n_merged, config.out_hidden_size)

    def __call__(self, hidden: mx.array) -> Any:
        if self.norms_merged:
            merged = self.norm(hidden.reshape(-1, self.n_merged))
        else:
            merged = self.norm(hidden).reshape(-1, self.n_merged)
        return self.linear_fc2(nn.gelu(self.linear_fc1(merged)))


class QwenPatches(nn.Module):  # type: ignore[misc]
    """The patch convolution as a matrix over (channels, frames, patch, patch)."""

    def __init__(self, config: QwenVision) -> None:
        super().__init__()
        self.n_frames = config.temporal_patch_size
        self.n_channels = config.in_channels
        n = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.proj = nn.Linear(n, config.hidden_size)

    def __call__(self, patches: mx.array) -> Any:
        n = patches.shape[0]
        frames = mx.repeat(patches.reshape(n, self.n_channels, 1, -1), self.n_frames, axis=2)
        return self.proj(frames.reshape(n, -1))


class QwenTower(VisionTower):
    """Patches of an image, in the order of `QwenProcessor`, to features."""

    patches = "patch_embed.proj.weight"

    def __init__(self, config: QwenVision) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = QwenPatches(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = [_block(config) for _ in range(config.depth)]
        self.merger = QwenMerger(config, norms_merged=False)
        self.deepstack_merger_list = [
            QwenMerger(config, norms_merged=True) for _ in config.deepstack_visual_indexes
        ]

    @property
    def sequence(self) -> list[VisionBlock]:
        """Blocks in order."""
        return list(self.blocks)

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Patches with their positions, and cosines and sines of the rotation."""
        rows, columns = self._places(size)
        indices, weights = self._neighbors(rows, columns, size)
        near = self.pos_embed(mx.array(indices))
        positions = (near * mx.array(weights)[..., None].astype(near.dtype)).sum(0)
        hidden = self.patch_embed(pixels.astype(near.dtype)) + positions
        head = self.config.hidden_size // self.config.num_heads
        steps = ROPE_BASE ** -(np.arange(0, head // 2, 2, dtype=np.float32) / (head // 2))
        return hidden, rotation([np.outer(rows, steps), np.outer(columns, steps)] * 2)

    def tap(self, index: int, hidden: mx.array) -> mx.array | None:
        """Features after the blocks that the configuration names."""
        if index not in self.config.deepstack_visual_indexes:
            return None
        level = self.config.deepstack_visual_indexes.index(index)
        merged: mx.array = self.deepstack_merger_list[level](hidden)
        return merged

    def leave(self, hidden: mx.array, size: ImageSize) -> mx.array:
        """Merged patches."""
        merged: mx.array = self.merger(hidden)
        return merged

    def _places(self, size: ImageSize) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each patch, those of a feature together."""
        merge = self.config.spatial_merge_size
        grid = np.indices((size.rows * merge, size.columns * merge))
        grid = grid.reshape(2, size.rows, merge, size.columns, merge).transpose(0, 1, 3, 2, 4)
        rows, columns = grid.reshape(2, -1)
        return rows, columns

    def _neighbors(
        self, rows: np.ndarray, columns: np.ndarray, size: ImageSize
    ) -> tuple[np.ndarray, np.ndarray]:
        """Four positions around each patch and bilinear weights, (4, n)."""
        merge = self.config.spatial_merge_size
        side = int(self.config.num_position_embeddings**0.5)
        y = np.linspace(0, side - 1, size.rows * merge, dtype=np.float32)[rows]
        x = np.linspace(0, side - 1, size.columns * merge, dtype=np.float32)[columns]
        top = y.astype(np.int32)
        left = x.astype(np.int32)
        bottom = np.minimum(top + 1, side - 1)
        right = np.minimum(left + 1, side - 1)
        dy = y - top
        dx = x - left
        indices = [top * side + left, top * side + right, bottom * side + left]
        weights = [(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx]
        return np.stack([*indices, bottom * side + right]), np.stack(weights)


def _block(config: QwenVision) -> VisionBlock:
    n = config.hidden_size
    return VisionBlock(
        norm1=nn.LayerNorm(n, eps=EPS),
        attn=QwenAttention(config),
        norm2=nn.LayerNorm(n, eps=EPS),
        mlp=PlainMLP(n, config.intermediate_size, "linear_fc1", "linear_fc2"),
    )
