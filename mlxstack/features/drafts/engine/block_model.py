"""DFlash and DFlash2 drafters: all tokens of a draft in one pass.

A block is the last known token and masks after it. Its queries attend to the block itself and to
the context, of which each layer keeps keys and values of the target's hidden states at every
position. The modules are those of mlx-vlm; attention is here, over rows whose contexts have
different lengths, by the rules of the authors' code (github.com/z-lab/dflash).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache
from msgspec import Struct

from mlxstack.engine.model.runner import ModelParts


class KnownKV(Struct, frozen=True):
    """Keys and values of a layer before the block of each row."""

    rows: Sequence[tuple[mx.array, mx.array]]
    """(1, kv heads, n, dim) each"""
    offsets: mx.array
    """Positions of the last known tokens, (rows,)."""


class BlockAttention(nn.Module):  # type: ignore[misc]
    """Attention of blocks, with the projections of `inner`.

    In layers with a window a query sees the context within it. Blocks are causal where the config
    says so and, unless it says otherwise, in layers with a window.
    """

    def __init__(self, inner: Any, is_causal: bool | None) -> None:
        super().__init__()
        self.inner = inner
        self._window = inner.sliding_window or 0
        self._is_causal = bool(self._window) if is_causal is None else is_causal

    def __call__(
        self, x: mx.array, _features: Any, rope: Any, known: KnownKV, _projected: Any = None
    ) -> mx.array:
        """Output (rows, n, dim) of blocks; signature of mlx-vlm's."""
        inner = self.inner
        n_rows, n_tokens, _ = x.shape
        projected = inner.q_proj(x).reshape(n_rows, n_tokens, inner.n_heads, -1)
        queries = rope(inner.q_norm(projected).swapaxes(1, 2), offset=known.offsets)
        keys, values = self.keys_and_values(x, rope, known.offsets)
        outputs = []
        for row, (old_keys, old_values) in enumerate(known.rows):
            own = slice(row, row + 1)
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    queries[own],
                    mx.concatenate([old_keys, keys[own]], axis=2),
                    mx.concatenate([old_values, values[own]], axis=2),
                    scale=inner.scale,
                    mask=self._mask(old_keys.shape[2], n_tokens),
                    sinks=inner.attention_sink_bias,
                )
            )
        joined = mx.concatenate(outputs).swapaxes(1, 2).reshape(n_rows, n_tokens, -1)
        output: mx.array = inner.o_proj(joined)
        return output

    def keys_and_values(self, x: mx.array, rope: Any, offset: Any) -> tuple[mx.array, mx.array]:
        """Keys and values (rows, kv heads, n, dim) from positions `offset` on."""
        inner = self.inner
        keys, values = inner._project_kv(x)
        shape = (*x.shape[:2], inner.n_kv_heads, inner.head_dim)
        keys = inner.k_norm(keys.reshape(shape)).swapaxes(1, 2)
        return rope(keys, offset=offset), values.reshape(shape).swapaxes(1, 2)

    def known(self, cache: KVCache) -> tuple[mx.array, mx.array]:
        """The part of a context that a block may see."""
        end = cache.offset
        start = max(0, end - self._window + 1) if self._window else 0
        return cache.keys[..., start:end, :], cache.values[..., start:end, :]

    def _mask(self, n_known: int, n_tokens: int) -> mx.array | None:
        if not self._window and not self._is_causal:
            return None
        query = n_known + mx.arange(n_tokens)[:, None]
        key = mx.arange(n_known + n_tokens)[None]
        visible = key <= query if self._is_causal else key <= n_known + n_tokens
        if self._window:
            visible = visible & ((query - key < self._window) | (key >= n_known))
        return visible


class BlockModel:
    """Drafter of blocks.

    Embedding and output head are those of its target. `drafter` is mlx-vlm's, with its weights;
    `layer_ids` are layers of the target.
    """

    def __init__(self, drafter: Any, target: ModelParts, is_causal: bool | None) -> None:
        config = drafter.config
        self._drafter = drafter
        self._target = target
        self.block_size = int(config.block_size)
        self.layer_ids = tuple(config.target_layer_ids)
        self._mask_token = int(config.mask_token_id)
        self._selector = getattr(drafter, "candidate_selector", None)
        self._input_scale = float(getattr(config, "input_embedding_scale", 1.0))
        self._output_scale = float(getattr(config, "output_multiplier", 1.0))
        self._softcap = config.final_logit_softcapping or 0.0
        self.features_width = drafter.fc.weight.shape[0] * len(self.layer_ids)
        for layer in drafter.layers:
            layer.self_attn = BlockAttention(layer.self_attn, is_causal)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a context's keys and values for each token."""
        caches = self.new_caches()
        self.extend(caches, mx.zeros((1, self.features_width), self._drafter.norm.weight.dtype))
        layers = zip(self._drafter.layers, caches, strict=True)
        known = [layer.self_attn.known(cache) for layer, cache in layers]
        return sum(array.nbytes for pair in known for array in pair)

    def new_caches(self) -> list[KVCache]:
        """Caches of an empty context, one for each layer."""
        return [KVCache() for _ in self._drafter.layers]

    def extend(self, caches: Sequence[KVCache], features: mx.array) -> None:
        """Append the positions of features (n, width) to a context."""
        drafter = self._drafter
        features = features.astype(drafter.norm.weight.dtype)
        states = drafter.hidden_norm(drafter.fc(features))[None]
        for layer, cache in zip(drafter.layers, caches, strict=True):
            attention = layer.self_attn
            pair = attention.keys_and_values(states, drafter.rope, cache.offset)
            cache.update_and_fetch(*pair)

    def draft(
        self, tokens: Sequence[int], contexts: Sequence[Sequence[KVCache]], n: int, n_vocab: int
    ) -> mx.array:
        """Draft tokens (rows, n) after the last known token of each row.

        No token from `n_vocab` on is chosen.
        """
        anchors = mx.array(list(tokens))
        hidden = self.hidden(anchors, contexts, n)
        logits = self._logits(hidden)[..., :n_vocab]
        if self._selector is None:
            return mx.argmax(logits, axis=-1)
        chosen: mx.array = self._selector.select(hidden, logits, anchors, None)
        return chosen

    def hidden(self, anchors: mx.array, contexts: Sequence[Sequence[KVCache]], n: int) -> mx.array:
        """Last hidden states (rows, n, dim) of the masks after `anchors`."""
        drafter = self._drafter
        masks = mx.full((len(anchors), n), self._mask_token, anchors.dtype)
        x = self._embedded(mx.concatenate([anchors[:, None], masks], axis=1))
        offsets = mx.array([caches[0].offset for caches in contexts])
        for i, layer in enumerate(drafter.layers):
            known = KnownKV([layer.self_attn.known(caches[i]) for caches in contexts], offsets)
            x = layer(x, None, drafter.rope, known, None)
        hidden: mx.array = drafter.norm(x)[:, 1:]
        return hidden

    def _embedded(self, tokens: mx.array) -> mx.array:
        embed = self._drafter.embed_tokens or self._target.embed
        embedded = embed(tokens) * self._input_scale
        return embedded.astype(self._drafter.norm.weight.dtype)

    def _logits(self, hidden: mx.array) -> mx.array:
        logits = self._target.head(hidden) * self._output_scale
        if self._softcap:
            logits = mx.tanh(logits / self._softcap) * self._softcap
        return logits
