"""Rotary embeddings whose frequencies depend on the length of a pass.

With dynamic NTK scaling mlx-lm computes the base from the last position of each pass, once that is
beyond the trained length. So KV depends on how a prompt was cut, and on whether tokens were
verified together. Here it is that of `mlx_lm.generate`, however passes are cut: the prompt but for
its last token in passes of `CHUNK` tokens, then one token at a time.

https://github.com/huggingface/transformers/pull/24653
"""

from typing import Any

import mlx.core as mx
from mlx import nn
from msgspec.structs import replace

from mlxstack.core.request import Request

CHUNK = 2048
"""`prefill_step_size` of `mlx_lm.generate.generate_step`."""
BY_LENGTH = frozenset({"DynamicNTKScalingRoPE"})
"""Classes of mlx-lm (rope_utils)."""


class PassLength:
    """Prompt length of the current pass.

    `n_prefill` are its tokens before the last one, 0 for a request that decodes.
    """

    n_prefill = 0


class LengthRope(nn.Module):  # type: ignore[misc]
    """Rotates tokens as a pass of mlx-lm that holds them would."""

    def __init__(self, inner: Any, length: PassLength) -> None:
        super().__init__()
        self.inner = inner
        self._length = length
        self._n_fixed = int(inner.max_position_embeddings)

    def __call__(self, x: mx.array, offset: Any = 0) -> Any:
        """Rotate x (..., tokens, dims) at positions from `offset` on.

        Raises TypeError for rows at different positions, so that attention is computed row by row.
        """
        if not isinstance(offset, int):
            raise TypeError("its rotary base depends on the length of each row")
        n_prefill = self._length.n_prefill
        end = offset + x.shape[-2]
        if max(n_prefill, end) <= self._n_fixed:
            return self.inner(x, offset=offset)
        pieces = []
        start = offset
        while start < end:
            first = start
            last = start + 1
            if start < n_prefill:
                first = start - start % CHUNK
                last = min(first + CHUNK, n_prefill)
            stop = min(end, last)
            piece = x[..., start - offset : stop - offset, :]
            pieces.append(self._rotated(piece, start, first, last))
            start = stop
        return mx.concatenate(pieces, axis=-2)

    def _rotated(self, piece: mx.array, start: int, first: int, last: int) -> Any:
        """Tokens from position `start` on, in a pass from `first` to `last`."""
        before = start - first
        n = piece.shape[-2]
        padding = [(0, 0)] * (piece.ndim - 2) + [(before, last - start - n), (0, 0)]
        rotated = self.inner(mx.pad(piece, padding), offset=first)
        return rotated[..., before : before + n, :]


def exact_ropes(model: nn.Module) -> int | None:
    """Replace embeddings that depend on the length.

    Returns the length up to which they do not; None for a model without any.
    """
    length = PassLength()
    fixed = []
    for _, module in model.named_modules():
        for name, child in list(module.items()):
            if type(child).__name__ in BY_LENGTH:
                setattr(module, name, LengthRope(child, length))
                fixed.append(int(child.max_position_embeddings))
    return min(fixed, default=None)


def pass_length(model: nn.Module) -> PassLength:
    """Length of the passes of a model, shared by its rotary embeddings."""
    ropes = (module for _, module in model.named_modules() if isinstance(module, LengthRope))
    return next((rope._length for rope in ropes), PassLength())


def keyed_by_length(request: Request, fixed: int) -> Request:
    """Request with a salt for the length of its prompt.

    KV of a prompt beyond `fixed` tokens depends on its length from the first token on, so only
    prompts of the same length find it.
    """
    n_prefill = len(request.tokens) - 1
    if n_prefill <= fixed:
        return request
    salt = f"{request.salt}\0{n_prefill} tokens"
    return replace(request, caller=replace(request.caller, salt=salt))
