"""SigLIP's vision tower with the projector of Gemma 3.

Transformers, modeling_siglip.py and modeling_gemma3.py: https://github.com/huggingface/transformers
"""

from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.towers.blocks import PlainMLP, VisionAttention, VisionBlock
from mlxstack.features.vision.towers.tower import VisionTower


class TextWidth(Struct, frozen=True):
    """Text model's part of the projector."""

    hidden_size: int = 2304


class Gemma3Vision(Struct, frozen=True):
    """`vision_config`, and what config.json says of the projector."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    image_size: int
    patch_size: int
    text_config: TextWidth
    num_channels: int = 3
    layer_norm_eps: float = 1e-6
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class Gemma3Projector(nn.Module):  # type: ignore[misc]
    """Features of the text model from means of squares of patches.

    They are divided by the scale of embeddings, which the text model applies to all.
    """

    def __init__(self, config: Gemma3Vision) -> None:
        super().__init__()
        n = config.text_config.hidden_size
        self.eps = config.layer_norm_eps
        self.embedding_scale = mx.array(n**0.5, mx.bfloat16).astype(mx.float32).item()
        self.mm_input_projection_weight = mx.zeros((config.hidden_size, n))
        self.mm_soft_emb_norm = {"weight": mx.zeros((config.hidden_size,))}

    def __call__(self, hidden: mx.array, size: ImageSize) -> Any:
        side = round((hidden.shape[0] / size.n_features) ** 0.5)
        grid = hidden.reshape(size.rows, side, size.columns, side, -1)
        means = grid.mean((1, 3)).reshape(size.n_features, -1)
        normed = mx.fast.rms_norm(means, 1 + self.mm_soft_emb_norm["weight"], self.eps)
        return normed @ self.mm_input_projection_weight / self.embedding_scale


class SiglipTower(VisionTower):
    """Patches of an image, in the order of `Gemma3Processor`, to features."""

    patches = "embeddings.patch_embedding.weight"

    def __init__(self, config: Gemma3Vision) -> None:
        super().__init__()
        n_patches = (config.image_size // config.patch_size) ** 2
        n_values = config.num_channels * config.patch_size**2
        self.embeddings = {
            "patch_embedding": nn.Linear(n_values, config.hidden_size),
            "position_embedding": nn.Embedding(n_patches, config.hidden_size),
        }
        self.encoder = {"layers": [_block(config) for _ in range(config.num_hidden_layers)]}
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.multi_modal_projector = Gemma3Projector(config)

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Patches with their positions."""
        patches, places = self.embeddings.values()
        positions = places(mx.arange(pixels.shape[0]))
        return patches(pixels.astype(positions.dtype)) + positions, None

    def leave(self, hidden: mx.array, size: ImageSize) -> mx.array:
        """Means of patches, projected."""
        features: mx.array = self.multi_modal_projector(self.post_layernorm(hidden), size)
        return features


def _block(config: Gemma3Vision) -> VisionBlock:
    n = config.hidden_size
    n_heads = config.num_attention_heads
    return VisionBlock(
        layer_norm1=nn.LayerNorm(n, eps=config.layer_norm_eps),
        self_attn=VisionAttention(nn.Linear, n, n // n_heads, n_heads, n_heads, "out_proj"),
        layer_norm2=nn.LayerNorm(n, eps=config.layer_norm_eps),
        mlp=PlainMLP(n, config.intermediate_size, "fc1", "fc2"),
    )
