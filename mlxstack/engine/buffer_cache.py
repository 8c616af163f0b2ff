"""Frees MLX's unused buffers without a deadlock between engines of one process.

`mx.clear_cache` waits for every CPU stream of the process while it holds the GIL. A load from a
Python file object (`engine.unfilled`) needs the GIL on the stream's thread. Whenever both happen
at once, each waits for the other for ever. So they exclude each other: no such load is under way
on any stream while the buffers are freed. Code of this package must call `clear` here instead of
`mx.clear_cache`, and hold `LOADING` while it evaluates a load from a Python object.
"""

from threading import Lock

import mlx.core as mx

LOADING = Lock()
"""Held while MLX reads from a Python object; waiting for it releases the GIL."""


def clear() -> None:
    """Give unused buffers back to the system. Callable from any thread."""
    with LOADING:
        mx.clear_cache()
