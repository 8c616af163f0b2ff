"""A stand-in for the engine, for what a healthy one never does: load for ever, hang, die.

It speaks the same events in the same order, from a thread of its own, and says the tokens it
was told to say.
"""

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from mlxstack.api.dialects.openai_chat.messages import read_message_file
from mlxstack.core.commands import (
    CollectGarbage,
    FlushResult,
    GCResult,
    SlotCommand,
    SlotCommandResult,
)
from mlxstack.core.engine_events import (
    Event,
    FinishReason,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    RequestTimings,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import Busy, Conflict
from mlxstack.core.interfaces import Manifest
from mlxstack.core.model_info import Identity, ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.core.request import Request
from mlxstack.engine.admin import PrefixCacheAdmin
from mlxstack.engine.loop import EngineLoop
from mlxstack.features.early_turns.service import EarlyTurns
from mlxstack.features.remote_kv.peers import Peers
from mlxstack.service.engine_factory import EngineFactory
from mlxstack.service.parts.agent_store import AgentStore
from mlxstack.service.parts.request_stream import EventDispatcher
from mlxstack.service.service import Service
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.write_counter import WriteCounter

T = TypeVar("T")
Deliver = Callable[[tuple[Event, ...]], None]

FACTS = ModelFacts(
    id="standin",
    path="",
    identity=Identity("standin", "0"),
    architecture="none",
    n_vocab=1024,
    n_ctx_train=1024,
    n_params=0,
    n_bytes=0,
    eos=frozenset({2}),
)


class NoCache(PrefixCacheAdmin):
    """Refuses every call on the cache."""

    def __init__(self) -> None:
        super().__init__(self._refuse)

    def _refuse(self, work: Callable[[EngineLoop], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_exception(Conflict("a stand-in has no memory"))
        return future


class StandIn:
    """`script` are the tokens of every answer; None hangs before the first one."""

    def __init__(self, tokenizer: Any, script: Sequence[int] | None = ()) -> None:
        self.tokenizer = tokenizer
        self.cache: PrefixCacheAdmin = NoCache()
        self.loading: Future[ModelFacts] = Future()
        self.script = script
        self.silent_s = 0.0
        self.is_dead = False
        self.is_full = False
        self.is_queueing = False
        self.asked: list[Request] = []
        self.cancelled: list[str] = []
        self.expected: list[tuple[Request, str]] = []
        self.deliver: Deliver = lambda _: None

    def start(self) -> Future[ModelFacts]:
        return self.loading

    def announced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, ask: Request) -> None:
        self.asked.append(ask)
        if self.is_full:
            self._later((RequestFailed(ask.id, Busy("the queue is full", 3)),))
            return
        if self.is_queueing:
            return
        seated = (SlotAssigned(ask.id, 0, len(ask.tokens), 0),)
        if self.script is None:
            self._later(seated)
            return
        n = len(ask.tokens)
        said = tuple(TokenSampled(ask.id, token) for token in self.script[: ask.max_tokens])
        work = RequestTimings(n_prompt=n, n_generated=len(said))
        is_cut = len(said) < len(self.script)
        last = RequestFinished(ask.id, FinishReason.LENGTH if is_cut else FinishReason.EOS, work)
        self._later((*seated, PrefillProgress(ask.id, n, n), *said, last))

    def begin_early(self, ask: Request, after: str) -> None:
        self.expected.append((ask, after))

    def park(self) -> Future[FlushResult]:
        future: Future[FlushResult] = Future()
        future.set_result(FlushResult(0, 0))
        return future

    def cancel(self, ask_id: str) -> None:
        self.cancelled.append(ask_id)
        self._later((RequestFinished(ask_id, FinishReason.CANCELLED, RequestTimings()),))

    def run_slot_command(self, command: SlotCommand) -> Future[SlotCommandResult]:
        future: Future[SlotCommandResult] = Future()
        future.set_exception(Conflict("a stand-in has no slots"))
        return future

    def import_kv(self, manifest: Manifest) -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(Conflict("a stand-in has no memory"))
        return future

    def sweep(self, wanted: CollectGarbage) -> Future[GCResult]:
        future: Future[GCResult] = Future()
        future.set_result(GCResult())
        return future

    def snapshot(self) -> Snapshot:
        return Snapshot()

    def stalled_s(self) -> float:
        return self.silent_s

    trouble = ""

    def is_alive(self) -> bool:
        return not self.is_dead

    def stop(self, drain_s: float) -> Future[None]:
        stopped: Future[None] = Future()
        stopped.set_result(None)
        return stopped

    def _later(self, events: tuple[Event, ...]) -> None:
        threading.Thread(target=self.deliver, args=(events,)).start()


def over(engine: StandIn, preset: Preset) -> Service:
    """A service over a stand-in, whose agents last as long as the process."""
    home = Path(tempfile.mkdtemp(prefix="standin-"))
    dispatcher = EventDispatcher()
    agent_store = AgentStore(AgentFolders(home / "agents"))
    agent_store.serve(preset.model.served_name, is_writing=False)
    peers = Peers((), DiskKVStore(home / "kv"))
    counter = WriteCounter(home / "writes.sqlite3")
    engine_factory = EngineFactory(home, peers.store, dispatcher, agent_store, peers, counter)
    engine.deliver = dispatcher.deliver
    service = Service(preset, engine_factory, engine, read_message_file, (peers, EarlyTurns()))
    weakref.finalize(service, shutil.rmtree, home, ignore_errors=True)
    return service


def early_turns_of(service: Service) -> EarlyTurns:
    """The feature of a service that begins next turns early."""
    feature = service.feature(EarlyTurns)
    assert feature is not None
    return feature
