"""One after another: the turns of an agent whose history the server keeps, and acts on it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from mlxstack.core.errors import Conflict


class AgentLocks:
    """Belongs to the event loop.

    A turn adds to the history that is kept here and waits in line for it; an ask brings its own
    history and waits for nobody but acts; an act changes the history while nobody speaks.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._pens: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._n_turns: Counter[str] = Counter()
        self._n_asked: Counter[str] = Counter()
        self._acting: set[str] = set()
        self._changed = asyncio.Event()

    def is_busy(self, agent: str) -> bool:
        """Whether a turn or an ask of this agent is under way, or waits."""
        return agent in self._n_turns or agent in self._n_asked

    @contextmanager
    def joined(self, agent: str) -> Iterator[None]:
        """A turn is in line, or under way."""
        with self._counted(self._n_turns, agent):
            yield

    @contextmanager
    def asking(self, agent: str) -> Iterator[None]:
        """An ask is under way."""
        with self._counted(self._n_asked, agent):
            yield

    async def enter(self, agent: str) -> asyncio.Lock:
        """Wait, in the order of arrival, until nothing is under way.

        Then it is the caller's turn, until the lock is released.
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
        """Wait while somebody changes the history."""
        while agent in self._acting:
            await self._change()

    @asynccontextmanager
    async def acting(self, agent: str) -> AsyncIterator[None]:
        """Nobody speaks meanwhile, and acts follow one another. Raises Conflict when busy."""
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

    def write_lock(self, agent: str) -> asyncio.Lock:
        """Whoever holds it writes the history; it goes round in the order of asking."""
        return self._pens.setdefault(agent, asyncio.Lock())

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
