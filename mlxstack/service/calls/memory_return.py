"""Returns freed memory of an idle service to the system."""

import asyncio
from functools import partial

from mlxstack.host.heap import allow_huge_pages, trim_heap
from mlxstack.service.parts.gate import SwapGate


async def return_free_memory(gate: SwapGate) -> None:
    """Return it; use no huge pages until the next request.

    The kernel would fill the freed parts again when it joins pages.
    """
    await asyncio.to_thread(trim_heap)
    if not gate.n_inside and not gate.wanted.is_set():
        allow_huge_pages(is_allowed=False)
        gate.on_next = partial(allow_huge_pages, is_allowed=True)
