"""Agent locks: order turns and history edits."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from mlxstack.core.errors import BadRequest, Conflict, StackError
from mlxstack.service.agents.store import AgentStore
from mlxstack.store.agent_locks import AgentLock, AgentLockFiles

log = logging.getLogger("mlxstack.agents")

Acquire = Callable[[AgentLockFiles, str], AgentLock | None]

POLL_S = 0.05
"""Seconds between two looks at a lock that another service holds."""
WRITE_S = 30.0
"""Seconds to wait for another writer of a history."""


class AgentLocks:
    """Locks on agents, in this process and across services of a home.

    It belongs to the event loop. A turn appends to the stored history and waits for its
    predecessors; a request brings its own history and waits only for edits; an edit changes the
    history while no request is under way.
    """

    def __init__(self, agent_store: AgentStore) -> None:
        self._agent_store = agent_store
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._writers: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._n_turns: Counter[str] = Counter()
        self._n_asked: Counter[str] = Counter()
        self._acting: set[str] = set()
        self._changed = asyncio.Event()

    def is_busy(self, agent: str) -> bool:
        """True while a turn or request of the agent runs or waits."""
        return agent in self._n_turns or agent in self._n_asked

    @contextmanager
    def joined(self, agent: str) -> Iterator[None]:
        """Count a turn that waits or is under way."""
        with self._counted(self._n_turns, agent):
            yield

    @contextmanager
    def asking(self, agent: str) -> Iterator[None]:
        """Count a request that is under way."""
        with self._counted(self._n_asked, agent):
            yield

    async def enter(self, agent: str) -> asyncio.Lock:
        """Wait in arrival order until the agent is idle; begin a turn.

        The lock that is returned ends it.
        """
        lock = self._locks.setdefault(agent, asyncio.Lock())
        await lock.acquire()
        try:
            while agent in self._n_asked:
                await self._change()
        except BaseException:
            lock.release()
            raise
        return lock

    async def until_no_act(self, agent: str) -> None:
        """Wait until no edit is under way."""
        while agent in self._acting:
            await self._change()

    @asynccontextmanager
    async def acting(self, agent: str) -> AsyncIterator[None]:
        """Edit the history of an idle agent. Raises Conflict when busy."""
        if self.is_busy(agent):
            raise _busy(agent)
        async with self._locks.setdefault(agent, asyncio.Lock()):
            if agent in self._n_asked:
                raise _busy(agent)
            self._acting.add(agent)
            try:
                yield
            finally:
                self._acting.discard(agent)
                self._changed.set()

    async def lock_turn(self, agent: str) -> AgentLock:
        """Lock of a turn, once no other service holds it."""
        return await self._wait(agent, AgentLockFiles.turn)

    async def lock_turn_now(self, agent: str) -> AgentLock:
        """Lock of a turn or an edit. Raises Conflict when held elsewhere."""
        held = await self._acquire(agent, AgentLockFiles.turn)
        if held is None:
            raise Conflict(
                f"agent {agent} is busy in another service of this home; try again when its"
                " request is over"
            )
        return held

    async def lock_request(self, agent: str) -> AgentLock:
        """Shared lock of a request with its own history, without waiting."""
        return await self._acquire(agent, AgentLockFiles.request) or AgentLock()

    @asynccontextmanager
    async def writing(self, agent: str) -> AsyncIterator[None]:
        """Exclude other writers of a history, in all services of the home.

        Raises Conflict when another process holds its lock for longer than a write can take.
        """
        async with self._writers.setdefault(agent, asyncio.Lock()):
            try:
                async with asyncio.timeout(WRITE_S):
                    held = await self._wait(agent, AgentLockFiles.history)
            except TimeoutError:
                raise Conflict(f"another service writes the history of agent {agent}") from None
            with held:
                yield

    async def _wait(self, agent: str, acquire: Acquire) -> AgentLock:
        while True:
            held = await self._acquire(agent, acquire)
            if held is not None:
                return held
            # No event tells when another process releases a lock.
            await asyncio.sleep(POLL_S)

    async def _acquire(self, agent: str, acquire: Acquire) -> AgentLock | None:
        """Acquire a lock; a disk error is logged and does not raise."""
        files = self._agent_store.locks
        if files is None:
            return AgentLock()
        working = asyncio.ensure_future(asyncio.to_thread(acquire, files, agent))
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

    @contextmanager
    def _counted(self, counts: Counter[str], agent: str) -> Iterator[None]:
        counts[agent] += 1
        try:
            yield
        finally:
            counts[agent] -= 1
            if not counts[agent]:
                del counts[agent]
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _busy(agent: str) -> Conflict:
    return Conflict(f"agent {agent} is busy; try again when its request is over")


def _release(working: "asyncio.Future[AgentLock | None]") -> None:
    """Release the lock of a caller that was cancelled."""
    if not working.cancelled() and working.exception() is None and (held := working.result()):
        held.release()
