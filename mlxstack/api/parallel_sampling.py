"""Several choices for one prompt: their asks, and their parts as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import structs

from mlxstack.api.run_generation import Parts
from mlxstack.core.errors import BadRequest
from mlxstack.service.generation import AdmittedRequest
from mlxstack.service.response_parts import ResponsePart
from mlxstack.service.service import Service


def n_choices(wanted: int | None, n_slots: int) -> int:
    """How many are wanted, one for each slot at most. Raises BadRequest."""
    if wanted is None:
        return 1
    if not 1 <= wanted <= n_slots:
        raise BadRequest(
            f"n is {wanted}; it must be 1 to {n_slots}, the number of slots of this service", "n"
        )
    return wanted


def check_all(n_prompts: int, n: int, service: Service) -> None:
    """Raises BadRequest for more choices than one request may ask for.

    They have to fit in the queue; as many as there are slots are always taken.
    """
    most = max(service.preset.queue.max_waiting, service.preset.slots.count)
    if n_prompts * n > most:
        raise BadRequest(
            f"{n_prompts} prompts with {n} choices each are {n_prompts * n} answers; "
            f"one request may ask for {most} (queue.max_waiting of the preset)",
            "prompt",
        )


def copies(order: AdmittedRequest, n: int) -> tuple[AdmittedRequest, ...]:
    """The order, and others like it that draw differently; only the first is its agent's."""
    return (order, *(_copy(order, i) for i in range(1, n)))


def _copy(order: AdmittedRequest, i: int) -> AdmittedRequest:
    request = order.request
    seed = request.sampling.seed
    drawn = structs.replace(request.sampling, seed=None if seed is None else seed + i)
    return structs.replace(
        order, request=structs.replace(request, id=f"{request.id}-{i}", agent=None, sampling=drawn)
    )


async def interleaved(replies: Sequence[Parts]) -> AsyncGenerator[tuple[int, ResponsePart], None]:
    """The parts of all replies, each with the index of its reply.

    The first failure ends them all, and so does leaving the iterator.
    """
    queue: asyncio.Queue[tuple[int, ResponsePart | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(queue, i, parts)) for i, parts in enumerate(replies)]
    n_open = len(tasks)
    try:
        while n_open:
            index, part = await queue.get()
            if isinstance(part, Exception):
                raise part
            if part is None:
                n_open -= 1
            else:
                yield index, part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    queue: asyncio.Queue[tuple[int, ResponsePart | Exception | None]], index: int, parts: Parts
) -> None:
    """None ends a reply that went well."""
    try:
        async with aclosing(parts):
            async for part in parts:
                queue.put_nowait((index, part))
        queue.put_nowait((index, None))
    except Exception as problem:
        queue.put_nowait((index, problem))
