"""Amounts in options, and sizes in tables."""

from mlxstack.cli.exit_codes import Misuse
from mlxstack.core import formatting, units


def tokens_of(text: str) -> int:
    """Tokens of `32768`, `32k` or `1m`. Raises Misuse."""
    n_tokens = units.tokens_in(text)
    if n_tokens is None:
        raise Misuse(f"`{text}` is not a number of tokens; write it as 32768 or 32k")
    return n_tokens


def bytes_of(text: str) -> int:
    """Bytes of `500MB`, `1.5 GiB` or a plain number. Raises Misuse."""
    n_bytes = units.bytes_in(text)
    if n_bytes is None:
        raise Misuse(f"`{text}` is not a size; write it as 500MB or 20GB")
    return n_bytes


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `15m`, `36h`, `30d` or `2w`. Raises Misuse."""
    seconds = units.seconds_in(text)
    if seconds is None:
        raise Misuse(f"`{text}` is not a time; write it as 15m, 36h or 30d")
    return seconds


def size(n_bytes: float) -> str:
    """Bytes for a table; `-` where there are none."""
    if n_bytes:
        return formatting.size(n_bytes)
    return "-"
