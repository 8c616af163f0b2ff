"""Sizes as people type them: 32k tokens, 24GB, 64 KiB."""

import re

from mlxstack.cli.exit_codes import Misuse
from mlxstack.core import formatting

KIB = 1024
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def tokens_of(text: str) -> int:
    """`32768`, `32k` (1,024 each) or `1m`. Raises Misuse."""
    found = re.fullmatch(r"(0*[1-9][0-9]*)([km]?)", text.strip().lower())
    if found is None:
        raise Misuse(f"`{text}` is not a number of tokens; write it as 32768 or 32k")
    return int(found[1]) * {"": 1, "k": KIB, "m": KIB * KIB}[found[2]]


def bytes_of(text: str) -> int:
    """`500MB`, `20GB`, `1.5 GiB` (1,024 each) or plain bytes. Raises Misuse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?", text.strip().lower())
    if found is None:
        raise Misuse(f"`{text}` is not a size; write it as 500MB or 20GB")
    return int(float(found[1]) * KIB ** (" kmgt".index(found[2] or " ")))


def seconds_of(text: str) -> float:
    """`90s`, `15m`, `36h`, `30d` or `2w`. Raises Misuse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise Misuse(f"`{text}` is not a time; write it as 15m, 36h or 30d")
    return float(found[1]) * SECONDS[found[2]]


def size(n_bytes: float) -> str:
    """Bytes for a table; `-` where there are none."""
    return formatting.size(n_bytes) if n_bytes else "-"
