"""Members of a gateway: requests enter them once they are loaded."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from enum import StrEnum
from typing import Any

from mlxstack.core.errors import StackError
from mlxstack.core.preset import Residency
from mlxstack.gateway.processes import MemberProcess
from mlxstack.gateway.spec import GatewayMember, GatewaySpec
from mlxstack.gateway.upstream import Upstream
from mlxstack.policy.residency import MemberView, ResidencyStep, residency_step

log = logging.getLogger("mlxstack.gateway")


WATCH_S = 5.0
"""Seconds between looks at members, which may have started again or unloaded their models."""


class MemberPhase(StrEnum):
    """Phase of a member; all but `unloaded` hold its reservation."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class MemberGate:
    """Gate of one member, with the requests inside and before it."""

    def __init__(
        self,
        spec: GatewayMember,
        secret: str,
        changed: asyncio.Event,
        left: Callable[["MemberGate"], None],
    ) -> None:
        self.spec = spec
        self.process = MemberProcess(spec, secret)
        self.upstream = Upstream(self.process.url)
        self.phase = MemberPhase.UNLOADED
        self.is_closed = self.is_lost = self._is_known = False
        self.n_active = 0
        self.n_requests = 0
        self.n_loads = 0
        self._loaded_at = self._used_at = 0.0
        self._pid: int | None = None
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._changed = changed
        self._left = left

    @property
    def n_waiting(self) -> int:
        """Requests that wait for it."""
        return len(self._waiting)

    @property
    def idle_s(self) -> float | None:
        """Seconds since its last request ended; None before the first."""
        if not self.n_requests:
            return None
        if self.n_active:
            return 0.0
        return time.monotonic() - self._used_at

    @property
    def is_loaded(self) -> bool:
        """Whether its model is loaded."""
        return self.phase is MemberPhase.LOADED

    @property
    def is_open(self) -> bool:
        """Whether a request may enter at once."""
        return self.is_loaded and not self.is_closed

    @property
    def is_running(self) -> bool:
        """Whether its process has answered and is not lost."""
        return self._is_known and self.phase is not MemberPhase.LOADING

    def view(self, now: float) -> MemberView:
        """The member as the decision sees it."""
        return MemberView(
            name=self.spec.name,
            n_bytes=self.spec.n_bytes,
            residency=self.spec.residency,
            is_loaded=self.phase is not MemberPhase.UNLOADED,
            n_active=self.n_active,
            loaded_at=now if self.phase is MemberPhase.LOADING else self._loaded_at,
            used_at=self._used_at,
            waiting_since=self._waiting[0][0] if self._waiting else None,
        )

    async def enter(self) -> None:
        """Wait until it is loaded; count the request. Raises StackError."""
        if not self.is_open:
            admitted = asyncio.get_running_loop().create_future()
            place = (time.monotonic(), admitted)
            self._waiting.append(place)
            self._changed.set()
            try:
                await admitted
            except asyncio.CancelledError:
                if place in self._waiting:
                    self._waiting.remove(place)
                elif admitted.done() and not admitted.cancelled() and not admitted.exception():
                    self.leave()
                raise
            return
        self._count()

    def leave(self) -> None:
        """Count a request as over."""
        self.n_active -= 1
        self._used_at = time.monotonic()
        self._left(self)

    @property
    def is_restarted(self) -> bool:
        """Whether its process started again, with its model, since it was unloaded."""
        is_out = self.phase is MemberPhase.UNLOADED and self._pid is not None
        return is_out and self.process.worker_pid not in {None, self._pid}

    def lose(self) -> None:
        """Hold requests until the process answers again."""
        if self.phase is MemberPhase.LOADED:
            self.phase = MemberPhase.LOADING
            self.is_lost = True
            self._changed.set()

    async def load(self) -> None:
        """Start the process and admit its requests, or fail them."""
        if await self._answers() is not None:
            self.n_loads += 1
            self._open(is_wanted=True)

    async def adopt(self) -> None:
        """Find out whether a running process has its model loaded.

        A loaded model without waiting requests counts as unused: it leaves before others.
        """
        pid = self.process.worker_pid
        status = await self._answers()
        if status == MemberPhase.UNLOADED:
            self._note_unloaded(pid)
        elif status is not None:
            self._open(is_wanted=bool(self._waiting))

    def notice_end(self) -> MemberPhase:
        """Phase now, without a call: unloaded if its process has ended."""
        if self.phase is MemberPhase.LOADED and not self.process.is_running:
            # Its port may be another program's by now: nothing is sent there any more.
            self._is_known = False
            self._note_unloaded(None)
        return self.phase

    async def look(self) -> MemberPhase:
        """Phase now; a member unloads its model by itself, or ends."""
        if self.notice_end() is MemberPhase.LOADED and not self.n_active:
            pid = self.process.worker_pid
            n_requests = self.n_requests
            status = await self.process.status()
            is_idle = self.phase is MemberPhase.LOADED and self.n_requests == n_requests
            if is_idle and status == MemberPhase.UNLOADED:
                if self.spec.stops:
                    await self.unload()
                else:
                    self._note_unloaded(pid)
        return self.phase

    async def unload(self) -> None:
        """Give its memory back; it holds its reservation until then."""
        self.phase = MemberPhase.UNLOADING
        if self.spec.stops:
            await self.process.stop()
            self._is_known = False
            self._note_unloaded(None)
            return
        pid = self.process.worker_pid
        await self.process.unload()
        self._note_unloaded(pid)

    def reopen(self) -> None:
        """Let requests in that waited for another member which came first."""
        self.is_closed = False
        if self.phase is MemberPhase.LOADED:
            self._admit()

    async def _answers(self) -> str | None:
        """Status of the process once it answers; None after a failure."""
        self.phase = MemberPhase.LOADING
        self.is_lost = False
        began = time.monotonic()
        try:
            status = await self.process.ensure()
        except StackError as error:
            self.phase = MemberPhase.UNLOADED
            log.error("%s", error.message)
            self._refuse(error)
            self._changed.set()
            return None
        self.upstream.close()
        self.upstream = Upstream(self.process.url)
        self._is_known = True
        log.info("%s answers %s after %.1f s", self.spec.name, status, time.monotonic() - began)
        return status

    def _open(self, *, is_wanted: bool) -> None:
        if is_wanted:
            self._loaded_at = self._used_at = time.monotonic()
        self.phase = MemberPhase.LOADED
        self.is_closed = False
        self._admit()
        self._changed.set()

    def _note_unloaded(self, pid: int | None) -> None:
        """End its reservation; `pid` is the worker without a model."""
        # Another worker, also the first one after a pause without any, has loaded it again.
        self._pid = pid or 0
        self.phase = MemberPhase.UNLOADED
        self.is_closed = False
        log.info("%s is unloaded", self.spec.name)
        self._changed.set()

    def _admit(self) -> None:
        while self._waiting:
            _, admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._count()

    def _refuse(self, error: StackError) -> None:
        while self._waiting:
            _, admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_exception(error)

    def _count(self) -> None:
        self.n_active += 1
        self.n_requests += 1
        self._used_at = time.monotonic()


class Members:
    """All members of a gateway, within its budget."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self._changed = asyncio.Event()
        self._changes: set[asyncio.Task[None]] = set()
        self.by_name = {
            member.name: MemberGate(member, spec.secret, self._changed, self._note_left)
            for member in spec.members
        }

    @property
    def default(self) -> MemberGate:
        """Member for requests that name none."""
        return self.by_name[self._spec.default]

    async def run(self) -> None:
        """Load and unload members, until cancelled."""
        try:
            self._resume()
            self._begin(self._watch())
            while True:
                self._changed.clear()
                await self._wait(self._step().look_at)
        finally:
            for task in self._changes:
                task.cancel()
            await asyncio.gather(*self._changes, return_exceptions=True)
            for member in self.by_name.values():
                member.upstream.close()

    async def stop(self, handed_over: Collection[str] = ()) -> None:
        """Stop all members that no other gateway takes over."""
        going = (member for name, member in self.by_name.items() if name not in handed_over)
        await asyncio.gather(*(member.process.stop() for member in going))

    def _resume(self) -> None:
        """Load resident members; take over running ones."""
        for member in self.by_name.values():
            if member.process.is_running:
                self._load(member, member.adopt())
            elif member.spec.residency is Residency.ALWAYS:
                self._load(member, member.load())

    def _note_left(self, member: MemberGate) -> None:
        """Decide residency again after a request."""
        is_leaving = member.is_closed or member.spec.residency is Residency.NEVER
        if is_leaving or any(gate.n_waiting for gate in self.by_name.values()):
            self._changed.set()

    async def _watch(self) -> None:
        """Look at the members in turns."""
        while True:
            await asyncio.sleep(WATCH_S)
            await asyncio.gather(*(member.look() for member in self.by_name.values()))

    def _step(self) -> ResidencyStep:
        now = time.monotonic()
        for member in self.by_name.values():
            if member.is_lost or member.is_restarted:
                self._load(member, member.adopt())
        views = [member.view(now) for member in self.by_name.values()]
        step = residency_step(views, self._spec.budget, self._spec.linger_s, now)
        for name, member in self.by_name.items():
            if name in step.closed:
                member.is_closed = True
            elif member.is_closed and member.phase is MemberPhase.LOADED:
                member.reopen()
        for name in step.unload:
            member = self.by_name[name]
            if member.phase is MemberPhase.LOADED:
                member.phase = MemberPhase.UNLOADING
                self._begin(member.unload())
        for name in step.load:
            member = self.by_name[name]
            self._load(member, member.load())
        return step

    async def _wait(self, look_at: float | None) -> None:
        patience_s = WATCH_S
        if look_at is not None:
            patience_s = min(WATCH_S, look_at - time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, patience_s)):
                await self._changed.wait()

    def _load(self, member: MemberGate, change: Coroutine[Any, Any, None]) -> None:
        member.phase = MemberPhase.LOADING
        member.is_lost = False
        self._begin(change)

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
