"""Work in a thread that is waited for, also by a caller who is cancelled meanwhile."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a cancelled caller goes only when the work is done.

    No thread can be cancelled: what it still writes would come after what others write next.
    """
    working = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        working.exception()
        raise cancelled
    return working.result()
