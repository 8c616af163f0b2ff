"""How much memory MLX holds in this process."""

import gc

import mlx.core as mx


def active_bytes() -> int:
    """Bytes of all arrays that are still held by somebody. Callable from any thread."""
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())
