"""Waits for facts: how long the tests wait for what must happen.

A limit only ends a test that hangs: a machine that is busy makes it slow, never red.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tests.environment import option

Found = TypeVar("Found")

PATIENCE_S = float(option("TEST_PATIENCE_S") or "300")
"""The limit of every wait in the tests, seconds; below that of pytest for a whole test."""
LOOK_S = 0.005
"""Pause between two looks at a fact that wakes nobody."""


def wait_until(
    fact: Callable[[], Found], description: str | Callable[[], object] = "it never came true"
) -> Found:
    """Return the fact when it is true; AssertionError with `description` after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while not (result := fact()):
        assert time.monotonic() < end, description() if callable(description) else description
        time.sleep(LOOK_S)
    return result


async def until(
    fact: Callable[[], Found], description: str | Callable[[], object] = "it never came true"
) -> Found:
    """The same within an event loop, which runs on."""
    end = time.monotonic() + PATIENCE_S
    while not (result := fact()):
        assert time.monotonic() < end, description() if callable(description) else description
        await asyncio.sleep(LOOK_S)
    return result
