"""MLX's cache of freed buffers: its bound, and the one way to empty it.

MLX reuses a freed buffer only for a request of about its size. Buffers whose size follows the
context are never asked for again, so on Metal, where the default limit is nearly all memory, the
cache must be emptied by its user.

`mx.clear_cache` waits for every CPU stream of the process while it holds the GIL. A load from a
Python file object (`slot_restore.unfilled`) needs the GIL on the stream's thread. Both at once
deadlock, so they exclude each other: no such load is under way on any stream while the buffers
are freed. Code of this package must call `release` here instead of
`mx.clear_cache`, and hold `LOADING` while it evaluates a load from a Python object.
"""

from contextlib import suppress
from threading import Lock

import mlx.core as mx

MIN_BOUND = 32 * 2**20
"""Bytes; MLX's own limit on a CPU. Less is not worth the allocations that follow."""

LOADING = Lock()
"""Held while MLX reads from a Python object; waiting for it releases the GIL."""


def synchronize() -> None:
    """Wait until no kernel runs. A computation that failed was reported where it was asked for."""
    with suppress(RuntimeError):
        mx.synchronize()


def release() -> None:
    """Empty the cache. MLX thread only: a buffer may be freed only when no kernel uses it."""
    synchronize()
    with LOADING:
        mx.clear_cache()
