"""Leaves a row only the tokens that its guide allows."""

import mlx.core as mx
import numpy as np


def masked(logits: mx.array, mask: bytes) -> mx.array:
    """Logits (1, vocabulary) with -inf for every token whose bit in `mask` is 0 or missing."""
    n = logits.shape[-1]
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=n, bitorder="little")
    allowed = mx.array(bits.astype(np.bool_))
    return mx.where(allowed, logits, mx.array(float("-inf"), logits.dtype))
