"""MLX's cache of freed buffers: its bound, and the one way to empty it.

MLX reuses a freed buffer only for a request of about its size. Buffers whose size follows the
context are never asked for again, so on Metal, where the default limit is nearly all memory, the
cache must be emptied by its user.
"""

from contextlib import suppress

import mlx.core as mx

MIN_BOUND = 32 * 2**20
"""Bytes; MLX's own limit on a CPU. Less is not worth the allocations that follow."""


def synchronize() -> None:
    """Wait until no kernel runs. A computation that failed was reported where it was asked for."""
    with suppress(RuntimeError):
        mx.synchronize()


def release() -> None:
    """Empty the cache. MLX thread only: a buffer may be freed only when no kernel uses it."""
    synchronize()
    mx.clear_cache()
