"""What mlx-lm really allocates for the KV of a model, row by row: held against its geometry."""

from collections.abc import Sequence

from mlxstack.policy.memory.capacity import STEP, Geometry, Layer, LayerKind


def allocated_bytes(geometry: Geometry, bites: Sequence[int]) -> int:
    """Exactly what mlx-lm has allocated after updates of so many tokens each."""
    return sum(
        layer.state_bytes * bool(bites) + geometry.token_bytes(layer) * _rows(layer, bites)
        for layer in geometry.layers
    )


def peak_bytes(geometry: Geometry, n_tokens: int, bite: int) -> int:
    """The most that is allocated while a context grows to `n_tokens`, as the geometry says."""
    return geometry.peak_full_bytes(n_tokens) + geometry.state_bytes(n_tokens, bite)


def _rows(layer: Layer, bites: Sequence[int]) -> int:
    if layer.kind is LayerKind.SLIDING:
        return _sliding_rows(bites, layer.window)
    if layer.kind in (LayerKind.FULL, LayerKind.LATENT, LayerKind.CHUNKED):
        return _growing_rows(bites, layer.window)
    return 0


def _growing_rows(bites: Sequence[int], chunk: int) -> int:
    """Rows of a KVCache, or of a ChunkedKVCache whose front is trimmed to `chunk`."""
    rows = held = 0
    for n in bites:
        if chunk and held > chunk:
            rows = held = chunk
        if held + n > rows:
            rows = (held if held % STEP else rows) + -(-n // STEP) * STEP
        held += n
    return rows


def _sliding_rows(bites: Sequence[int], window: int) -> int:
    """Rows of a RotatingKVCache: single tokens are written in place, bites are appended."""
    rows = offset = at = 0
    for n in bites:
        if n > 1:
            kept = rows if at == rows or at < offset else at
            rows = at = kept - max(0, kept - window + 1) + n
        else:
            if offset >= rows and rows < window:
                rows += min(STEP, window - offset)
                at = offset
            if rows > window:
                rows = at = window
            at = (0 if at == window else at) + 1
        offset += n
    return rows
