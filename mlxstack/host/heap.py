"""Returns freed heap memory to the system."""

import ctypes
import gc

PR_SET_THP_DISABLE = 41
"""https://man7.org/linux/man-pages/man2/PR_SET_THP_DISABLE.2const.html"""


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


def allow_huge_pages(*, is_allowed: bool) -> None:
    """Allow the kernel to use huge pages for this process, on Linux.

    It also joins small pages to huge ones later, and takes memory again for the returned pages
    between them: a heap that was trimmed grows back while nothing runs.
    https://docs.kernel.org/admin-guide/mm/transhuge.html
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_THP_DISABLE, *(ctypes.c_ulong(n) for n in (not is_allowed, 0, 0, 0)))
