"""Sizes as people type and read them: 32k tokens, 24GB, 64 KiB."""

from mlxstack.core.errors import SetupError
from mlxstack.host.machine import amount

KIB, MIB = 1024, 1024 * 1024


def tokens_of(text: str) -> int:
    """`32768`, `32k` (1,024 each) or `1m`. Raises SetupError."""
    lowered = text.strip().lower()
    factor = {"k": KIB, "m": MIB}.get(lowered[-1:], 1)
    digits = lowered[:-1] if factor > 1 else lowered
    if not digits.isdigit() or not int(digits):
        raise SetupError(f"`{text}` is not a number of tokens; write it as 32768 or 32k")
    return int(digits) * factor


def tokens(n: int) -> str:
    """`32k` where that is exact, else all digits."""
    return f"{n // KIB}k" if n and n % KIB == 0 else str(n)


def size(n_bytes: float) -> str:
    """Bytes as `64 KiB`, `320 MiB` or `12.3 GiB`; 0 as `-`."""
    if not n_bytes:
        return "-"
    return f"{n_bytes / KIB:.4g} KiB" if n_bytes < MIB else amount(n_bytes)
