"""Owns the engine: its start and stop, its health, and the asks on their way through it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import SlotCommand, SlotCommandResult, SlotRestoreResult, SlotSaveResult
from mlxstack.core.engine_events import SlotAssigned
from mlxstack.core.engine_snapshot import Counters, Snapshot
from mlxstack.core.errors import Broken, Busy, Loading, SetupError, StackError, Unsupported
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import PARKING_S, Preset
from mlxstack.core.request import Request
from mlxstack.core.status import ThroughputSample
from mlxstack.host.sleep import SleepAssertion, caffeinate
from mlxstack.service.agents import accounts
from mlxstack.service.agents.locks import AgentLocks
from mlxstack.service.agents.registry import AgentRegistry
from mlxstack.service.agents.store import AgentStore
from mlxstack.service.event_dispatcher import EventDispatcher
from mlxstack.service.gate import SwapGate
from mlxstack.service.request_log import RequestLog
from mlxstack.service.request_stream import (
    Embedder,
    Engine,
    GenerationEngine,
    RequestStream,
)
from mlxstack.service.text_processor import CHANGED, TextProcessor

if TYPE_CHECKING:
    from mlxstack.engine.admin import PrefixCacheAdmin
    from mlxstack.service.engine_factory import EngineFactory

log = logging.getLogger("mlxstack.service")

T = TypeVar("T")

STALLED_S = 10.0
"""So long without a turn, with work to do, and the service does not call itself healthy."""
GIVE_UP_S = 120.0
"""So long, and everybody who waits is told."""
WATCH_S = 1.0
NO_GENERATION = "This server has an embedding model: it has no slots and generates no text"
NO_EMBEDDINGS = (
    "This server does not support embeddings; start an embedding preset beside it, "
    "such as `mlx-stack up demo-embedding`"
)
LEAVING = "the service is shutting down; try again when it is back"
ANSWER_S = 2.0
"""Seconds in which requests that have failed tell their clients so."""
MOST_SAMPLES = 301
"""Five minutes, at one per second."""


class ServiceHealth(StrEnum):
    """How the service is."""

    LOADING = "loading"
    OK = "ok"
    STALLED = "stalled"
    BROKEN = "broken"
    SWAPPING = "swapping"
    STOPPING = "stopping"


class Change(Struct, frozen=True):
    """A change of models under way: the next model, and the step that began at `since`.

    `since` is monotonic; a step that takes more than `limit_s` seconds is stuck.
    """

    model: str
    step: str
    since: float
    limit_s: float

    @property
    def trouble(self) -> str:
        """What is wrong with a step that is stuck; empty while it is not."""
        spent_s = time.monotonic() - self.since
        if spent_s <= self.limit_s:
            return ""
        return (
            f"the change of the model to {self.model} is stuck: the step {self.step} has taken "
            f"{spent_s:.0f} s; see the service log"
        )


class SlotIOBytes(Struct, frozen=True):
    """Bytes that saving slots wrote anew, and restoring them read."""

    n_saved: int = 0
    n_restored: int = 0


class Service:
    """The one engine of this process, seen from asyncio.

    `n_tended` counts changes of the KV memory by hand, for those who watch it. `n_unparsed`
    counts tool calls of all replies that made no sense. `library` keeps what
    explicit agents said, by default only while the process lives; without a `supply` the model
    cannot be changed. `bytes_before_load` is what MLX held when the model was loaded. `died` is set
    when there is no engine left that could answer; `trouble` says why. `is_engine_left` tells
    after `stop` that the engine's thread still computes: such a process has to exit at once.
    """

    def __init__(
        self,
        preset: Preset,
        dispatcher: EventDispatcher,
        engine: GenerationEngine | Embedder,
        agent_store: AgentStore | None = None,
        engine_factory: "EngineFactory | None" = None,
    ) -> None:
        self.preset = preset
        self.engine = engine
        self.started_at = time.time()
        self.last_in_slot: dict[int, Request] = {}
        self.n_unparsed = 0
        self.slot_io_bytes = SlotIOBytes()
        self.n_tended = 0
        self.agent_store = agent_store or AgentStore(None)
        self.agent_store.model = self.name
        self.engine_factory = engine_factory
        self.lines = AgentLocks()
        self.gate = SwapGate()
        self.change: Change | None = None
        self.sleep = SleepAssertion(caffeinate() if preset.server.prevent_sleep else None)
        self.bytes_before_load = 0
        self.is_engine_left = False
        self.died = asyncio.Event()
        self.trouble = ""
        self.samples: deque[ThroughputSample] = deque(maxlen=MOST_SAMPLES)
        self._past = Counters()
        self._dispatcher = dispatcher
        self._facts: ModelFacts | None = None
        self._words: TextProcessor | None = None
        self._health = ServiceHealth.LOADING
        self._watch: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """What the model is called on the wire: the preset's alias, or its model's id."""
        return name_of(self.preset)

    @property
    def request_log(self) -> RequestLog:
        """The last requests and misses."""
        return self._dispatcher.request_log

    @property
    def agent_registry(self) -> AgentRegistry:
        """The agents of this service."""
        return self._dispatcher.request_log.agent_registry

    def snapshot(self) -> Snapshot:
        """The engine's, with the counters of the engines before it."""
        now = self.engine.snapshot()
        return replace(now, counters=self._past.plus(now.counters))

    @property
    def generator(self) -> GenerationEngine:
        """The engine, when it generates text. Raises Unsupported."""
        if isinstance(self.engine, Embedder):
            raise Unsupported(NO_GENERATION)
        return self.engine

    @property
    def embedder(self) -> Embedder:
        """The engine, when it embeds. Raises Unsupported."""
        if not isinstance(self.engine, Embedder):
            raise Unsupported(NO_EMBEDDINGS)
        return self.engine

    @property
    def cache(self) -> "PrefixCacheAdmin":
        """Calls on the prefix cache. Raises as `require`, and Unsupported."""
        self.require()
        return self.generator.cache

    @property
    def n_ctx(self) -> int:
        """Tokens per slot, as the engine serves them."""
        views = self.engine.snapshot().slots
        return views[0].n_ctx if views else self.preset.slots.n_ctx

    @property
    def facts(self) -> ModelFacts:
        """Raises Loading until the model is there, Broken when it never will be."""
        self.require()
        assert self._facts is not None
        return self._facts

    @property
    def text_processor(self) -> TextProcessor:
        """The text tools of the loaded model. Raises as `facts` does."""
        self.require()
        assert self._words is not None
        return self._words

    @property
    def health(self) -> ServiceHealth:
        """LOADING, OK, STALLED after ten silent seconds with work, SWAPPING, BROKEN, STOPPING."""
        if self._health is ServiceHealth.OK and self.gate.is_closed:
            return ServiceHealth.SWAPPING
        if self._health is ServiceHealth.OK and self.engine.stalled_s() > STALLED_S:
            return ServiceHealth.STALLED
        return self._health

    async def start(self) -> ModelFacts:
        """Load the model on the MLX thread. Raises what made the load fail."""
        self._dispatcher.bind(asyncio.get_running_loop())
        await asyncio.to_thread(accounts.load, self.agent_store, self.agent_registry)
        try:
            return await self._begin()
        except StackError as error:
            self._health, self.trouble = ServiceHealth.BROKEN, error.message
            raise

    async def unload_model(self, limit_s: float) -> None:
        """End the engine, and let go of everything that came from its model.

        One that does not end within `limit_s` is given up: raises Broken.
        """
        self._health = ServiceHealth.SWAPPING
        if self._watch is not None:
            self._watch.cancel()
        if not await ended(self.engine, limit_s):
            why = f"the engine of {self.name} did not end within {limit_s:g} s"
            self.give_up(why)
            raise Broken(why)
        gone = Busy("the model is being changed; try again in a moment")
        self._dispatcher.fail_all(gone)
        if self._words is not None:
            self._words.close(gone)
        self._facts = self._words = self.request_log.decode = None
        self.last_in_slot.clear()

    async def load_model(self, preset: Preset, engine: GenerationEngine | Embedder) -> ModelFacts:
        """Serve this preset by this engine from now on. Raises what made the load fail."""
        self._past = self._past.plus(self.engine.snapshot().counters)
        self.preset, self.engine = preset, engine
        self.agent_store.model = self.name
        return await self._begin()

    def give_up(self, why: str) -> None:
        """There is no engine any more, and none to be had."""
        self._health, self.trouble = ServiceHealth.BROKEN, why
        self._fail_all(why)
        self.died.set()

    async def _begin(self) -> ModelFacts:
        """Raises StackError, whatever it was that went wrong."""
        try:
            return await self._load()
        except StackError:
            raise
        except Exception as error:
            log.exception("loading the model failed")
            why = f"the model cannot be loaded: {type(error).__name__}: {error}"
            raise SetupError(why) from error

    async def _load(self) -> ModelFacts:
        if self.engine_factory is not None:
            self.bytes_before_load = await asyncio.to_thread(self.engine_factory.active_bytes)
        # A caller that is cancelled does not cancel the load: its thread sets the future.
        facts = await asyncio.shield(asyncio.wrap_future(self.engine.start()))
        words = await asyncio.to_thread(
            TextProcessor, self.engine.tokenizer, self.preset, facts.n_vocab
        )
        self._facts, self._words = facts, words
        self.request_log.decode = words.decode
        if self._health in (ServiceHealth.LOADING, ServiceHealth.SWAPPING):
            self._health = ServiceHealth.OK
        self._watch = asyncio.create_task(self._watch_engine())
        return facts

    async def stop(self, drain_s: float) -> None:
        """Let running asks finish for `drain_s` seconds, refuse the others, end the engine.

        Requests end with the drain, also while a step of the engine takes longer. The engine
        has PARKING_S more to end its step and park. One that is still loading, or stuck, is left
        behind: its thread is a daemon.
        """
        was_loading = self._health in (ServiceHealth.LOADING, ServiceHealth.SWAPPING)
        self._health = ServiceHealth.STOPPING
        if self._watch is not None:
            self._watch.cancel()
        stopping = asyncio.wrap_future(self.engine.stop(drain_s))
        await asyncio.wait({stopping}, timeout=0.0 if was_loading else drain_s)
        await asyncio.gather(
            self._end_requests(Loading(LEAVING)),
            asyncio.wait({stopping}, timeout=0.0 if was_loading else PARKING_S),
        )
        self.is_engine_left = not stopping.done()
        self.sleep.close()

    async def _end_requests(self, reason: StackError) -> None:
        """Fail those that wait for the engine, then whatever else has not ended."""
        self._dispatcher.fail_all(reason)
        if self._words is not None:
            self._words.close(reason)
        await self.gate.emptied(ANSWER_S)
        self.gate.interrupt(reason)

    @contextmanager
    def open(self, request: Request, words: TextProcessor) -> Iterator[RequestStream]:
        """Submit an ask made with `words`; leaving before its end cancels it.

        Raises as `require_model` does.
        """
        self.require_model(words)
        engine = self.generator
        ticket = RequestStream(request, self._dispatcher.open(request), engine)
        line = self.lines.asking(request.agent) if request.agent is not None else nullcontext()
        with line, self.sleep.request():
            try:
                engine.submit(request)
                yield ticket
            finally:
                self._dispatcher.close(request.id)
                ticket.cancel()

    async def run_slot_command(self, act: SlotCommand) -> SlotCommandResult:
        """Save, restore or erase, once the slot is idle."""
        self.require()
        done = await asyncio.wrap_future(self.generator.run_slot_command(act))
        if isinstance(done, SlotSaveResult):
            self.slot_io_bytes = replace(
                self.slot_io_bytes, n_saved=self.slot_io_bytes.n_saved + done.n_written
            )
        elif isinstance(done, SlotRestoreResult):
            self.slot_io_bytes = replace(
                self.slot_io_bytes, n_restored=self.slot_io_bytes.n_restored + done.n_read
            )
        return done

    async def change_cache(self, change: Future[T]) -> T:
        """Wait for a change of the prefix cache by hand, and count it."""
        done = await asyncio.wrap_future(change)
        self.n_tended += 1
        return done

    def remember(self, seated: SlotAssigned, request: Request) -> None:
        """Keep what a slot was last asked, for people who look at it."""
        self.last_in_slot[seated.slot] = request

    def sample(self) -> None:
        """Keep what was done so far, for those who come later and ask for the last minutes."""
        now = self.snapshot().counters
        self.samples.append(
            ThroughputSample(time.time(), now.n_prompt_tokens, now.n_generated_tokens)
        )

    def require(self) -> None:
        """Raises Loading until the model is there, Broken when it never will be."""
        match self._health:
            case ServiceHealth.LOADING:
                raise Loading("Loading model")
            case ServiceHealth.SWAPPING:
                raise Loading("the model is being changed; try again in a moment")
            case ServiceHealth.BROKEN:
                raise Broken(f"{self.trouble}; see the service log")
            case ServiceHealth.STOPPING:
                raise Loading(LEAVING)

    def require_model(self, words: TextProcessor) -> None:
        """Raise Busy when tokens made with `words` are of a model that is served no more."""
        self.require()
        if words is not self._words:
            raise Busy(CHANGED)

    async def _watch_engine(self) -> None:
        """A dead or stuck engine fails everyone who waits for it, loudly."""
        while self.engine.is_alive():
            if (silent := self.engine.stalled_s()) > GIVE_UP_S:
                self._fail_all(f"the engine has not finished a turn for {silent:.0f} s")
            await asyncio.sleep(WATCH_S)
        self.give_up("the engine's thread has died")

    def _fail_all(self, reason: str) -> None:
        what = f"{reason}; see the service log. A supervised service starts again by itself"
        n_failed = self._dispatcher.fail_all(Broken(what))
        if n_failed:
            log.error("%s: %d requests failed", reason, n_failed)


async def ended(engine: Engine, limit_s: float) -> bool:
    """End an engine without a drain; whether it ended within `limit_s` seconds."""
    stopping = asyncio.wrap_future(engine.stop(0.0))
    await asyncio.wait({stopping}, timeout=limit_s)
    return stopping.done()


def name_of(preset: Preset) -> str:
    """The name of a preset's model on the wire: its alias, or its id."""
    return preset.model.alias or plain(preset.model.id)


def plain(model: str) -> str:
    """A hub id as it is, a folder by its last name."""
    is_folder = model.startswith(("/", "./", "../", "~"))
    return PurePath(model).name if is_folder else model
