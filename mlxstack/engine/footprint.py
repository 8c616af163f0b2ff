"""How much memory MLX holds in this process, and who must not hold it."""

import gc
import traceback

import mlx.core as mx


def active_bytes() -> int:
    """Bytes of all arrays in use, MLX's cached buffers not among them. Thread-safe."""
    gc.collect()
    return int(mx.get_active_memory())


def clear_traceback_frames(error: BaseException | None) -> None:
    """An error that is kept does not keep the arrays of those who raised it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
