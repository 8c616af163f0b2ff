"""Facts of macOS: version, wired limit, panics of the GPU."""

import platform
from functools import cache

MIN_MACOS = (14, 0)
"""First version with wheels of MLX."""


@cache
def macos_version() -> tuple[int, ...]:
    """Version of macOS; empty elsewhere."""
    return tuple(int(part) for part in platform.mac_ver()[0].split(".") if part.isdigit())
