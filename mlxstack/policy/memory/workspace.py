"""Bytes of activations, logits and attention scores beside weights and KV."""

from mlxstack.policy.attention_kernels import FULL_DIMS
from mlxstack.policy.memory.kv_geometry import PLAIN_BITS, Geometry, LayerKind, ModelShape

TABLE_BYTES = 640
"""Bytes of the grammar compiler's table for a token of the vocabulary (llguidance 1.7)."""

SCORE_COPIES = 2
"""Copies of scores without fused attention: scores and their softmax."""

MAX_SCORE_BYTES = 2**30
"""Bytes of attention scores per chunk; long contexts get shorter chunks."""


def workspace_bytes(shape: ModelShape, chunk: int, n_slots: int = 1) -> int:
    """Upper estimate of activations, logits and the grammar compiler's table."""
    heads, dim = shape.n_heads, shape.hidden // max(1, shape.n_heads)
    dim = max((layer.k_dim for layer in shape.geometry.layers), default=dim) or dim
    per_token = 6 * shape.hidden + 3 * shape.inner + 2 * heads * dim
    logits = shape.n_vocab * 4 * (n_slots + 1)
    table = shape.n_vocab * TABLE_BYTES
    return int(per_token * chunk * shape.geometry.element_bytes + logits + table)


def score_bytes(shape: ModelShape, bits: int) -> int:
    """Bytes of attention scores per query and context token; 0: fused.

    `bits` is the KV precision: attention over quantized KV is never fused on a GPU.
    """
    each = shape.n_heads * shape.geometry.element_bytes * SCORE_COPIES
    return 0 if _is_fused(shape.geometry, bits) else each


def peak_score_bytes(shape: ModelShape, bits: int, chunk: int, n_ctx: int) -> int:
    """Peak bytes of attention scores in a prefill of `n_ctx` tokens.

    On a GPU.
    """
    return min(MAX_SCORE_BYTES, score_bytes(shape, bits) * chunk * n_ctx)


def _is_fused(geometry: Geometry, bits: int) -> bool:
    return bits == PLAIN_BITS and all(
        (layer.k_dim, layer.v_dim) in FULL_DIMS
        if layer.kind is LayerKind.FULL
        else layer.kind is not LayerKind.LATENT
        for layer in geometry.layers
    )
