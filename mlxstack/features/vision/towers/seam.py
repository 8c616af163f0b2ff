"""Embeddings, positions and added features of a chunk with images."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.prompt_tokens import ImageSpan, without_virtual
from mlxstack.engine.model.row_views import ExtraPairs
from mlxstack.engine.model.runner import EmbeddedChunk, SlotTokens
from mlxstack.features.vision.images.families import is_bidirectional
from mlxstack.features.vision.towers import mrope
from mlxstack.features.vision.towers.tower import Features


class ImageModel(Struct, frozen=True):
    """Text model that takes images."""

    model: Any
    placeholder: int
    """Token id of an image in its vocabulary."""
    has_mrope: bool = False
    """Whether positions have three dimensions."""
    is_bidirectional: bool = False
    """Whether all tokens of an image attend to each other, so that it is not cut."""
    only_in_windows: bool = False
    """Whether they do so in layers with a window alone, and within it."""
    per_layer_token: int | None = None
    """Token whose embeddings per layer a feature gets."""

    def shift(self, images: Sequence[ImageSpan], index: int) -> int:
        """Position minus index of the text token at `index`."""
        return mrope.delta(images, index) if self.has_mrope else 0

    def slot_tokens(
        self,
        caches: Sequence[Any],
        tokens: Sequence[int],
        start: int,
        images: Sequence[ImageSpan],
        parts: Sequence[Features],
    ) -> SlotTokens:
        """Tokens from `start` on of a prompt with `images`, for a pass.

        `parts` are the features of their virtual ids.
        """
        shift = self.shift(images, start)
        places = [i for i, token in enumerate(tokens) if token >= FIRST_VIRTUAL]
        if not places:
            return SlotTokens(caches, mx.array(list(tokens)), shift)
        # Embeddings per layer are those of these ids; all others are replaced below.
        feature = self.placeholder if self.per_layer_token is None else self.per_layer_token
        ids = mx.array(without_virtual(tokens, feature))
        indices = mx.array(places)
        text_model = getattr(self.model, "language_model", self.model)
        embeddings = text_model.model.embed_tokens(ids)
        embeddings[indices] = mx.concatenate([part.embeddings for part in parts]).astype(
            embeddings.dtype
        )
        added = []
        for level in zip(*(part.deepstack for part in parts), strict=True):
            whole = mx.zeros_like(embeddings)
            whole[indices] = mx.concatenate(list(level)).astype(whole.dtype)
            added.append(whole)
        if not self.has_mrope:
            chunk = EmbeddedChunk(embeddings, together=self._together(tokens))
            return SlotTokens(caches, ids, embedded=chunk)
        positions = mrope.positions(images, start, start + len(tokens))
        chunk = EmbeddedChunk(embeddings, mx.array(positions), tuple(added))
        return SlotTokens(caches, ids, shift, chunk)

    def _together(self, tokens: Sequence[int]) -> ExtraPairs | None:
        """Pairs of tokens of the one image of a chunk."""
        if not self.is_bidirectional:
            return None
        is_image = mx.array([token >= FIRST_VIRTUAL for token in tokens])
        return ExtraPairs(is_image[:, None] & is_image, self.only_in_windows)


class ImageRope(nn.Module):  # type: ignore[misc]
    """Rotary embedding at three positions per token (M-RoPE), or at one.

    The three axes take turns over the frequencies, as `sections` allow.
    """

    def __init__(self, rope: nn.RoPE, sections: Sequence[int]) -> None:
        super().__init__()
        self.rope = rope
        half = rope.dims // 2
        steps = np.arange(half)
        axes = steps % 3
        axes[steps >= 3 * np.array(sections)[axes]] = 0
        self._axes = mx.array(axes)
        self._steps = mx.array(rope.base ** (-steps.astype(np.float32) / half))

    def __call__(self, x: mx.array, offset: Any = 0) -> Any:
        if not isinstance(offset, mx.array) or offset.ndim != 2:
            return self.rope(x, offset=offset)
        angles = offset[self._axes].T.astype(mx.float32) * self._steps
        cos = mx.cos(angles)
        sin = mx.sin(angles)
        half = angles.shape[1]
        first = x[..., :half]
        second = x[..., half : 2 * half]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return mx.concatenate([*(a.astype(x.dtype) for a in turned), x[..., 2 * half :]], axis=-1)


def image_model(model: Any, config: dict[str, Any]) -> ImageModel | None:
    """Prepare a text model for images; None if unknown."""
    kind = config.get("model_type")
    text = config.get("text_config") or {}
    placeholder = config.get("image_token_index", config.get("image_token_id"))
    if not isinstance(placeholder, int):
        return None
    if kind in ("mistral3", "llama"):
        # Pixtral's tower: features in place of embeddings, positions as in text.
        if text.get("model_type") == "mistral4":
            return None
        return ImageModel(model, placeholder)
    if kind == "gemma3":
        return ImageModel(model, placeholder, is_bidirectional=True)
    if kind == "gemma4":
        # As Transformers' modeling_gemma4.py; mlx-vlm takes the same embeddings of padding, but
        # joins the tokens of an image in layers without a window too.
        return ImageModel(
            model,
            placeholder,
            is_bidirectional=is_bidirectional(config),
            only_in_windows=True,
            per_layer_token=text.get("pad_token_id") or 0,
        )
    return _qwen_model(model, config, placeholder)


def _qwen_model(model: Any, config: dict[str, Any], placeholder: int) -> ImageModel | None:
    """Qwen: positions of three dimensions, and features of lower blocks."""
    text = config.get("text_config") or {}
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = settings.get("mrope_section")
    layers = [layer for layer in model.layers if hasattr(layer, "self_attn")]
    ropes = [layer.self_attn.rope for layer in layers]
    is_plain = all(type(rope) is nn.RoPE and rope.scale == 1 for rope in ropes)
    if not (sections and is_plain and settings.get("mrope_interleaved", True)):
        return None
    for layer, rope in zip(layers, ropes, strict=True):
        layer.self_attn.rope = ImageRope(rope, sections)
    n_levels = len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    for layer in model.layers[:n_levels]:
        layer.__class__ = _adding(type(layer))
    return ImageModel(model, placeholder, has_mrope=True)


def _adding(kind: type[Any]) -> type[Any]:
    """Layer class that adds the features of its cache (deepstack)."""

    class Adding(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
            out = super().__call__(x, mask, cache)
            added = getattr(cache, "added", None)
            return out if added is None else out + added

    Adding.__name__ = kind.__name__
    return Adding
