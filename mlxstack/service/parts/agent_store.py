"""Agent store: histories and saved KV, and the locks on both."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from threading import Lock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, Conflict, Damaged, NotFound, StackError
from mlxstack.core.interfaces import Manifest
from mlxstack.store.agent_history import (
    AgentFolders,
    AgentLock,
    AgentLockFiles,
    History,
    image_names,
)

log = logging.getLogger("mlxstack.agents")

MAX_GONE = 1000
"""Maximum names of deleted agents, above the number of pending writes."""


class StoredKV(Struct, frozen=True):
    """Saved KV of an agent for one model."""

    model: str
    n_tokens: int
    n_bytes: int


class AgentStore:
    """Histories of agents; callable from any thread.

    Where `serve` says so, histories last as long as the process. `locks` keep other services of a
    home from changing a history at the same time.
    """

    def __init__(self, folders: AgentFolders, locks: AgentLockFiles | None = None) -> None:
        self._is_writing = True
        self._model = ""
        self._folders = folders
        self._locks = locks
        self._loose: dict[str, History] = {}
        self._refused: set[str] = set()
        self._gone: dict[str, None] = {}
        self._keeping = Lock()
        self._stored: dict[str, dict[str, StoredKV]] = {}

    def serve(self, model: str, *, is_writing: bool) -> None:
        """Set the served model's name, and whether agents are written."""
        self._model = model
        self._is_writing = is_writing

    @property
    def locks(self) -> AgentLockFiles | None:
        """Lock files of the agents; histories in memory alone need none."""
        return self._locks if self._is_writing else None

    def agents(self) -> tuple[str, ...]:
        """The ids of all agents with a history, sorted."""
        return tuple(sorted({*self._folders.agents(), *self._loose}))

    def has(self, agent: str) -> bool:
        """True if there is a history, readable or damaged. Raises Unreadable."""
        return agent in self._loose or self._folders.has(agent)

    def read(self, agent: str) -> History:
        """History of an agent. Raises NotFound or Damaged."""
        loose = self._loose.get(agent)
        if loose is None:
            return self._folders.read(agent)
        return loose

    def image(self, agent: str, name: str) -> bytes:
        """An image that a history names. Raises Damaged."""
        loose = self._loose.get(agent)
        if loose is not None and name in loose.images:
            return loose.images[name]
        return self._folders.image(agent, name)

    def write(self, agent: str, history: History) -> None:
        """Replace the history, durably where it may be written. Raises StackError."""
        if not self._is_writing:
            self._loose[agent] = history
            return
        self._folders.write(agent, history)
        self._loose.pop(agent, None)
        self._refused.discard(agent)
        self._gone.pop(agent, None)

    def agents_with_settings(self) -> tuple[str, ...]:
        """The ids of agents without a history that have settings. Raises Unreadable."""
        return self._folders.agents_with_settings()

    def read_settings(self, agent: str) -> dict[str, Any]:
        """Settings of an agent without a history. Raises NotFound or Damaged."""
        return self._folders.read_settings(agent)

    def write_settings(self, agent: str, fields: Mapping[str, Any]) -> None:
        """Replace the settings of an agent without a history. Raises StackError."""
        if self._is_writing:
            self._folders.write_settings(agent, fields)

    def reserve(self, agent: str, history: History) -> None:
        """Keep a history in memory that the disk refused, until written."""
        self._loose[agent] = history
        self._refused.add(agent)

    @property
    def refused(self) -> tuple[str, ...]:
        """Agents whose histories the disk refused; none while writing is off."""
        return tuple(self._refused) if self._is_writing else ()

    def write_refused(self, agent: str) -> None:
        """Write the history that the disk refused, if any. Raises StackError."""
        if agent in self._refused:
            self.write(agent, self._loose[agent])

    def remove(self, agent: str) -> None:
        """Delete history and KV manifests. Raises NotFound, or StackError: then all stays."""
        missing: NotFound | None = None
        with self._keeping:
            try:
                self._folders.remove(agent)
            except NotFound as error:
                missing = error
            is_loose = self._loose.pop(agent, None) is not None
            self._refused.discard(agent)
            self._gone[agent] = None
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
            self._stored.pop(agent, None)
        if missing is not None and not is_loose:
            raise missing

    def put(self, agent: str, manifest: Manifest) -> None:
        """Write the manifest of an agent's KV for one model. Raises StackError."""
        if not self._is_writing:
            return
        named = replace(manifest, model=manifest.model or self._model)
        with self._keeping:
            # A write that was pending when its agent was deleted does not restore it.
            if agent not in self._gone:
                self._folders.write_manifest(agent, manifest.identity, named)
                self._note(agent, named)

    def manifest(self, agent: str, identity: str) -> Manifest | None:
        """Saved context of an agent for one model; None if unreadable."""
        with suppress(NotFound, Damaged):
            return self._folders.read_manifest(agent, identity)
        return None

    def stored(self, agent: str) -> tuple[StoredKV, ...]:
        """Saved KV of an agent, one entry per model."""
        return tuple(self._stored.get(agent, {}).values())

    def identities(self, agent: str) -> frozenset[str]:
        """Identities of the models with saved KV of this agent."""
        return frozenset(self._stored.get(agent, ()))

    def survey(self) -> None:
        """Read the manifests of earlier runs; damaged ones are logged and ignored."""
        try:
            files = self._folders.manifests()
        except StackError as error:
            log.warning("%s; what is saved of agents is not known", error)
            return
        for file in files:
            try:
                self._note(file.agent, self._folders.peek_manifest(file.agent, file.model))
            except StackError as error:
                log.warning("%s; its next request starts cold if its KV is not found", error)

    def look_again(self) -> None:
        """Forget the manifests that a garbage collection deleted."""
        with self._keeping, suppress(StackError):
            on_disk = {(file.agent, file.model) for file in self._folders.manifests()}
            for agent, stored in self._stored.items():
                self._stored[agent] = {m: kv for m, kv in stored.items() if (agent, m) in on_disk}

    def copy(self, agent: str, new_agent: str) -> None:
        """Copy history and manifests of `agent` to `new_agent`, without KV.

        Raises Conflict when there is a `new_agent`, NotFound when `agent` is unknown.
        """
        if self.has(new_agent):
            raise Conflict(f"there is an agent {new_agent} already; delete it or choose another id")
        history = self.read(agent)
        images = {name: self.image(agent, name) for name in image_names(history.messages)}
        self.write(new_agent, replace(history, images=images))
        for file in self._folders.manifests():
            if file.agent == agent:
                with suppress(StackError):
                    self.put(new_agent, self._folders.peek_manifest(agent, file.model))

    def _note(self, agent: str, manifest: Manifest) -> None:
        stored_kv = StoredKV(manifest.model, len(manifest.tokens), manifest.n_bytes)
        self._stored.setdefault(agent, {})[manifest.identity] = stored_kv


P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, but a cancelled caller waits until the work is done.

    No thread can be cancelled: its late write would overwrite a newer one.
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

    def joined(self, agent: str) -> AbstractContextManager[None]:
        """Count a turn that waits or is under way."""
        return self._counted(self._n_turns, agent)

    def asking(self, agent: str) -> AbstractContextManager[None]:
        """Count a request that is under way."""
        return self._counted(self._n_asked, agent)

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
