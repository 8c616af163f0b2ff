"""Returns freed heap memory to the system."""

import ctypes
import gc


def trim_heap() -> bool:
    """Collect garbage, and return free pages; whether any. Thread-safe.

    glibc keeps what threads have freed until the end of an arena is free, macOS until the
    computer is short of memory. Other C libraries return it by themselves; there, nothing more is
    done.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        return bool(libc.malloc_trim(ctypes.c_size_t(0)))
    if hasattr(libc, "malloc_zone_pressure_relief"):
        libc.malloc_zone_pressure_relief.restype = ctypes.c_size_t
        return bool(libc.malloc_zone_pressure_relief(None, ctypes.c_size_t(0)))
    return False
