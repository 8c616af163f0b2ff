"""EAGLE-3 drafters, as heads over pairs.

The first layer takes the embedding of a token and the outputs of three layers of the target for
the token before it; later tokens of a draft take the drafter's own states in their place. Source:
arXiv 2503.01840. The modules are those of mlx-vlm.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask

from mlxstack.engine.model.runner import ModelParts
from mlxstack.features.drafts.engine.layer_taps import LayerTaps


class EagleHead(nn.Module):  # type: ignore[misc]
    """EAGLE-3 drafter of mlx-vlm as a head over pairs."""

    def __init__(self, drafter: Any, taps: LayerTaps, embed: Any) -> None:
        super().__init__()
        self.drafter = drafter
        self.target = taps.parts
        self._taps = taps
        # The embedding is its own, or else the target's.
        self._embed = drafter.embed_tokens if "embed_tokens" in drafter else embed

    def __call__(self, features: mx.array, cache: Sequence[Any]) -> mx.array:
        return self.logits(self.states(features, cache))

    @property
    def layers(self) -> Any:
        """Its layers, each of which keeps KV."""
        return self.drafter.layers

    def inputs(self, states: mx.array) -> mx.array:
        """States (n, dim) to draft from, of the target's."""
        return self._taps.taken(states)

    def features(self, tokens: mx.array, states: mx.array) -> mx.array:
        """Features of tokens (n,) after states of target or drafter."""
        own = self.drafter.norm.weight
        if states.shape[-1] != own.shape[0]:
            states = self.drafter._prepare_target_hidden(states.astype(own.dtype))
        return mx.concatenate([self._embed(tokens).astype(own.dtype), states], axis=-1)

    def states(self, features: mx.array, caches: Sequence[Any]) -> mx.array:
        """States (B, T, dim) to draft from, and to go on from."""
        embeddings, x = mx.split(features, 2, axis=-1)
        mask = create_attention_mask(x, caches[0])
        first, *others = self.drafter.layers
        x = first(embeddings, x, mask, caches[0], None)
        for layer, cache in zip(others, caches[1:], strict=True):
            x = layer(x, mask, cache, None)
        output: mx.array = x
        return output

    def logits(self, states: mx.array) -> mx.array:
        """Logits (..., vocabulary of the drafter) of the states."""
        logits: mx.array = self.drafter._logits(states)
        return logits

    def chosen(self, logits: mx.array, n_vocab: int) -> mx.array:
        """The likeliest tokens (n,) below `n_vocab`."""
        offsets: mx.array | None = self.drafter.d2t
        if offsets is None:
            return mx.argmax(logits[..., :n_vocab], axis=-1)
        ids = mx.argmax(logits, axis=-1)
        return mx.minimum(ids + offsets[ids], n_vocab - 1)

    @property
    def parts(self) -> ModelParts:
        """The head as a model of its own, whose tokens are features."""
        return ModelParts(self.states, self.logits, self._embed, self.example)

    def example(self, n: int) -> mx.array:
        """Features of `n` pairs, to measure passes with."""
        weight = self.drafter.norm.weight
        return mx.zeros((n, 2 * weight.shape[0]), weight.dtype)
