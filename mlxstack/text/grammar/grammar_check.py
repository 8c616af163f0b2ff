"""Checks in a child process that a grammar compiles in bounded time.

llguidance bounds the work of a grammar, except for `multipleOf`: a schema of 200 bytes with
several of them takes minutes and gigabytes, and a thread in it cannot be stopped.
"""

import math
import re
from decimal import Decimal
from typing import Any

from mlxstack.core.errors import BadRequest

LIMIT_S = 2.0
"""CPU seconds that a grammar may take in the process."""
MAX_BYTES = 4 * 1024**3
"""Memory that the process may take, its vocabulary included."""
MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, counted in units of its last decimal place."""
COSTLY = "multipleOf"
VALUES = frozenset({"enum", "const", "default", "example", "examples"})
"""Schema keywords with data as values, where `multipleOf` means nothing."""
MAX_UNCHECKED = 50_000
"""Maximum characters; an object's compile time grows faster than quadratically."""
CHEAP = re.compile(r'multipleOf\\*": ?1e-10\b')
"""The multiple that bounds the decimal places of every number."""
ESCAPED = re.compile(r"(?<!\\)\\++u00([0-9a-fA-F]{2})")


def is_bounded(grammar: str) -> bool:
    """Whether llguidance alone bounds the time that compiling takes."""
    text = ESCAPED.sub(lambda match: chr(int(match[1], 16)), grammar)
    return len(grammar) <= MAX_UNCHECKED and COSTLY not in CHEAP.sub("", text)


def check_multiples(schema: Any, param: str) -> None:
    """Raise BadRequest for a `multipleOf` that is not positive or too large."""
    if isinstance(schema, dict):
        _check_multiple(schema.get(COSTLY), param)
        inner = [value for key, value in schema.items() if key not in VALUES]
    else:
        inner = schema
    for part in inner:
        if isinstance(part, dict | list):
            check_multiples(part, param)


def _check_multiple(multiple: Any, param: str) -> None:
    # Anything but a number is refused by llguidance, or belongs to a property of this name.
    if (
        isinstance(multiple, bool)
        or not isinstance(multiple, int | float)
        or not math.isfinite(multiple)
    ):
        return
    if multiple <= 0:
        raise BadRequest(f"{param}: multipleOf is {multiple}; it must be greater than 0", param)
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    units = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    if units > MAX_MULTIPLE:
        raise BadRequest(
            f"{param}: multipleOf is {multiple}, which cannot be enforced; without its decimal "
            f"point it may be {MAX_MULTIPLE} at most, as with 0.01 or 5000",
            param,
        )
