"""One after another: the requests of an agent whose history the server keeps."""

import asyncio
from collections import Counter
from weakref import WeakValueDictionary


class Lines:
    """Belongs to the event loop. `begin` and `end` count asks that came with their own history."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._n_asked: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def begin(self, agent: str) -> None:
        """An ask of this agent is under way."""
        self._n_asked[agent] += 1

    def end(self, agent: str) -> None:
        """It is over."""
        self._n_asked[agent] -= 1
        if not self._n_asked[agent]:
            del self._n_asked[agent]
        self._changed.set()

    def is_busy(self, agent: str) -> bool:
        """Whether anything is under way for this agent, or waits for its turn."""
        lock = self._locks.get(agent)
        return agent in self._n_asked or (lock is not None and lock.locked())

    async def enter(self, agent: str) -> asyncio.Lock:
        """Wait, in the order of arrival, until nothing is under way.

        Then it is the caller's turn, until the lock is released.
        """
        lock = self._locks.setdefault(agent, asyncio.Lock())
        await lock.acquire()
        try:
            while agent in self._n_asked:
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            lock.release()
            raise
        return lock
