"""Queue of one request's events: order, patience, one timer."""

import asyncio
import time

from mlxstack.core.engine_events import TokenSampled
from mlxstack.service.parts.request_stream import EventQueue
from tests.patience import PATIENCE_S


async def waited(queue: EventQueue, patience_s: float) -> float:
    """Seconds until the queue gives up."""
    began = time.perf_counter()
    assert await queue.get(patience_s) is None
    return time.perf_counter() - began


async def test_events_come_in_order_and_wake_the_reader() -> None:
    queue = EventQueue()
    events = [TokenSampled("a", n) for n in range(3)]
    queue.put(events[0])
    queue.put(events[1])
    assert [await queue.get(PATIENCE_S), await queue.get(PATIENCE_S)] == events[:2]
    reading = asyncio.create_task(queue.get(PATIENCE_S))
    await asyncio.sleep(0)
    queue.put(events[2])
    assert await reading == events[2]
    assert await queue.get(0) is None
    queue.close()


async def test_a_wait_ends_after_its_own_patience() -> None:
    queue = EventQueue()
    assert 0.05 <= await waited(queue, 0.06) < PATIENCE_S
    reading = asyncio.create_task(queue.get(PATIENCE_S))
    await asyncio.sleep(0)
    queue.put(TokenSampled("a", 1))
    await reading
    # The timer of that wait is set for that long.
    assert 0.05 <= await waited(queue, 0.06) < PATIENCE_S
    # This one is set for a shorter time than the wait.
    reading = asyncio.create_task(queue.get(0.02))
    await asyncio.sleep(0)
    queue.put(TokenSampled("a", 2))
    await reading
    assert 0.15 <= await waited(queue, 0.16) < PATIENCE_S
    queue.close()


async def test_a_cancelled_wait_leaves_the_events() -> None:
    queue = EventQueue()
    reading = asyncio.create_task(queue.get(PATIENCE_S))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    queue.put(TokenSampled("a", 1))
    assert await queue.get(0) == TokenSampled("a", 1)
    queue.close()
