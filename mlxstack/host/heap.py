"""Returns freed heap memory to the system."""

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> bool:
    """Return all arenas' free pages to the system; False without any.

    glibc keeps what threads have freed until the end of an arena is free. Other C libraries give
    it back by themselves; there, nothing is done.
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@cache
def _malloc_trim() -> Any:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
    return trim
