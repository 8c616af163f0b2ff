"""Positions of tokens in the three-dimensional rotary embedding of Qwen (M-RoPE).

The features of an image have its row and column as positions; text goes on after the longer side.
Between images all three positions are equal: ordinary rotation at the token's index plus a delta.
"""

from collections.abc import Sequence

import numpy as np

from mlxstack.core.prompt_tokens import ImageSpan


def delta(spans: Sequence[ImageSpan], index: int) -> int:
    """Position minus index of the text token at `index`."""
    sizes = [span.size for span in spans if span.end <= index]
    return sum(max(size.rows, size.columns) - size.n_features for size in sizes)


def positions(spans: Sequence[ImageSpan], start: int, end: int) -> np.ndarray:
    """Positions (3, end - start) of the tokens `[start, end)`.

    They are time, row and column. `spans` are all images of the prompt, in order; one may lie
    across an end of the range.
    """
    indices = np.arange(start, end, dtype=np.int32)
    axes = np.stack([indices] * 3)
    for span in spans:
        shift = max(span.size.rows, span.size.columns) - span.size.n_features
        axes[:, indices >= span.end] += shift
    for span in spans:
        inside = (span.start <= indices) & (indices < span.end)
        offsets = indices[inside] - span.start
        first = span.start + delta(spans, span.start)
        rows, columns = np.divmod(offsets, span.size.columns)
        axes[:, inside] = first + np.stack([np.zeros_like(offsets), rows, columns])
    return axes
