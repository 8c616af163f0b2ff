"""Waits for the locks on agents between the services of a home, beside the event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mlxstack.core.errors import BadRequest, Conflict, StackError
from mlxstack.service.service import Service
from mlxstack.store.agent_locks import AgentLock

log = logging.getLogger("mlxstack.agents")

POLL_S = 0.05
"""Seconds between two looks at a lock that another service holds."""
WRITE_S = 30.0
"""Seconds that a writer of a history waits for another one, which writes for milliseconds."""


async def turn(service: Service, agent: str) -> AgentLock:
    """The lock of a turn, as soon as no other service holds it."""
    return await _patiently(agent, service.agent_store.lock_turn)


async def turn_now(service: Service, agent: str) -> AgentLock:
    """The lock of a turn or an edit. Raises Conflict when another service holds it."""
    held = await _acquire(agent, service.agent_store.lock_turn)
    if held is None:
        raise Conflict(
            f"agent {agent} is busy in another service of this home; try again when its request "
            "is over"
        )
    return held


async def request(service: Service, agent: str) -> AgentLock:
    """A shared lock of a request that brings its own conversation; it waits for no turn."""
    return await _acquire(agent, service.agent_store.lock_request) or AgentLock()


@asynccontextmanager
async def writing(service: Service, agent: str) -> AsyncIterator[None]:
    """One writer of a history at a time, in this process and in the others of this home.

    Raises Conflict when another process holds its lock for longer than a write can take.
    """
    async with service.lines.write_lock(agent):
        try:
            async with asyncio.timeout(WRITE_S):
                held = await _patiently(agent, service.agent_store.lock_history)
        except TimeoutError:
            raise Conflict(f"another service writes the history of agent {agent}") from None
        with held:
            yield


async def _patiently(agent: str, acquire: Callable[[str], AgentLock | None]) -> AgentLock:
    while True:
        held = await _acquire(agent, acquire)
        if held is not None:
            return held
        # No event tells when another process releases a lock.
        await asyncio.sleep(POLL_S)


async def _acquire(agent: str, acquire: Callable[[str], AgentLock | None]) -> AgentLock | None:
    """The lock; a disk that refuses one costs a line in the log, not the request."""
    working = asyncio.ensure_future(asyncio.to_thread(acquire, agent))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(_release)
        raise
    except BadRequest:
        raise
    except StackError as error:
        log.warning("%s; other services of this home may change its history meanwhile", error)
        return AgentLock()


def _release(working: "asyncio.Future[AgentLock | None]") -> None:
    """What was acquired for a caller who is gone."""
    if not working.cancelled() and working.exception() is None and (held := working.result()):
        held.release()
