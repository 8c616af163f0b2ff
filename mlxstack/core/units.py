"""Amounts as people write them: 32k tokens, 20GB, 30d."""

import re
from collections.abc import Callable

TOKENS = re.compile(r"(0*[1-9][0-9]*)([km]?)")
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?")
TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Unit = Callable[[str], float | None]


def tokens_in(text: str) -> int | None:
    """Tokens of `32768`, `32k` (1,024 each) or `1m`, else None."""
    match = TOKENS.fullmatch(text.strip().lower())
    if match is None:
        return None
    factor: int = 1024 ** " km".index(match[2] or " ")
    return int(match[1]) * factor


def bytes_in(text: str) -> int | None:
    """Bytes of `20GB`, `1.5 GiB` (1,024 each) or a number, else None."""
    match = BYTES.fullmatch(text.strip().lower())
    if match:
        return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))
    return None


def seconds_in(text: str) -> float | None:
    """Seconds of `90s`, `15m`, `36h`, `30d` or `2w`, else None."""
    match = TIME.fullmatch(text.strip().lower())
    return float(match[1]) * SECONDS[match[2]] if match else None
