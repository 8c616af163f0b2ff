"""Service over one engine: start and stop, health, requests under way."""

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec import Struct

from mlxstack.core.commands import SlotCommand, SlotCommandResult
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import (
    Broken,
    Busy,
    InvalidSlot,
    Loading,
    SetupError,
    StackError,
    Unsupported,
)
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import PARKING_S, Preset, ServiceKind
from mlxstack.core.request import Request, SamplingParams
from mlxstack.host.sleep import SleepAssertion, caffeinate
from mlxstack.policy.default_sampling import default_sampling
from mlxstack.service.parts.agent_registry import restore_agents
from mlxstack.service.parts.agent_store import AgentLocks, in_thread
from mlxstack.service.parts.gate import SwapGate
from mlxstack.service.parts.request_stream import RequestStream
from mlxstack.service.parts.service_feature import ServiceFeature
from mlxstack.service.parts.stats import ServiceStats
from mlxstack.service.parts.stored_messages import MessageReader
from mlxstack.service.parts.text_assembly import text_processor_of
from mlxstack.service.parts.text_processor import TemplateFacts, TextProcessor
from mlxstack.service.parts.work_threads import CHANGED

if TYPE_CHECKING:
    from mlxstack.engine.admin import PrefixCacheAdmin
    from mlxstack.engine.chat_engine import ChatEngine
    from mlxstack.engine.embedding_engine import EmbeddingEngine
    from mlxstack.service.engine_factory import EngineFactory

    AnyEngine = ChatEngine | EmbeddingEngine

log = logging.getLogger("mlxstack.service")

T = TypeVar("T")
F = TypeVar("F", bound=ServiceFeature)


STALLED_S = 10.0
"""Seconds without a step, despite work, until the service is stalled."""
TEXT_STALLED_S = 30.0
"""Seconds in which no thread ends its prompt, while all have one, until it is stalled too."""
GIVE_UP_S = 120.0
"""Seconds without a step until all waiting requests fail."""
WATCH_S = 1.0
NO_GENERATION = "This server has an embedding model: it has no slots and generates no text"
NO_EMBEDDINGS = (
    "This server does not support embeddings; start an embedding preset beside it, "
    "such as `mlx-stack up demo-embedding`"
)
LEAVING = "the service is shutting down; try again when it is back"
ANSWER_S = 2.0
"""Seconds for failed requests to send their errors."""


class ServiceHealth(StrEnum):
    """Health of the service."""

    LOADING = "loading"
    OK = "ok"
    STALLED = "stalled"
    BROKEN = "broken"
    SWAPPING = "swapping"
    UNLOADED = "unloaded"
    STOPPING = "stopping"


class Change(Struct, frozen=True):
    """Model swap under way: next model, and its step."""

    model: str
    step: str
    since: float
    """Monotonic time of the step's begin or last progress."""
    limit_s: float
    """Seconds without progress after which the step is stuck."""

    @property
    def trouble(self) -> str:
        """Problem of a step that is stuck; empty while it is not."""
        spent_s = time.monotonic() - self.since
        if spent_s <= self.limit_s:
            return ""
        return (
            f"the change of the model to {self.model} is stuck: the step {self.step} has taken "
            f"{spent_s:.0f} s; see the service log"
        )


class ServedModel:
    """Model of a service; an unloaded one keeps only its facts."""

    def __init__(
        self, facts: ModelFacts, text_processor: TextProcessor, watchdog: asyncio.Task[None]
    ) -> None:
        self.facts = facts
        self.template = text_processor.facts
        self.text_processor: TextProcessor | None = text_processor
        self.watchdog = watchdog

    def close(self, reason: StackError) -> None:
        """Refuse new and waiting work on texts, which raises `reason`."""
        if self.text_processor is not None:
            self.text_processor.threads.close(reason)
        self.text_processor = None


class Service:
    """The one engine of this process, as asyncio code uses it."""

    def __init__(
        self,
        preset: Preset,
        engine_factory: "EngineFactory",
        engine: "AnyEngine",
        read_messages: MessageReader,
        features: tuple[ServiceFeature, ...] = (),
    ) -> None:
        self.preset = preset
        self.name = preset.model.served_name
        """Model name in the API: the preset's alias, or its model's id."""
        self.read_messages = read_messages
        self.features = features
        self.engine = engine
        self.stats = ServiceStats()
        self.agent_store = engine_factory.agent_store
        """Histories of explicit agents."""
        self.engine_factory = engine_factory
        self.agent_locks = AgentLocks(self.agent_store)
        self.gate = SwapGate()
        self.change: Change | None = None
        self.sleep = SleepAssertion(caffeinate() if preset.server.prevent_sleep else None)
        self.is_engine_left = False
        """After `stop`: the engine's thread still computes, so the process has to exit at once."""
        self.died = asyncio.Event()
        """Set when no engine is left that could answer."""
        self.trouble = ""
        """Reason of the death."""
        self._dispatcher = engine_factory.dispatcher
        self.request_log = self._dispatcher.request_log
        self.agent_registry = self.request_log.agent_registry
        self.request_log.observers += [feature.on_end for feature in features]
        self._model: ServedModel | None = None
        """None before the first model is loaded."""
        self._health = ServiceHealth.LOADING

    def snapshot(self) -> Snapshot:
        """Snapshot of the engine, with the counters of the engines before it."""
        return self.stats.total(self.engine.snapshot())

    @property
    def generator(self) -> "ChatEngine":
        """The engine, when it generates text. Raises Unsupported."""
        if self._is_embedding:
            raise Unsupported(NO_GENERATION)
        return cast("ChatEngine", self.engine)

    @property
    def embedder(self) -> "EmbeddingEngine":
        """The engine, when it embeds. Raises Unsupported."""
        if not self._is_embedding:
            raise Unsupported(NO_EMBEDDINGS)
        return cast("EmbeddingEngine", self.engine)

    @property
    def _is_embedding(self) -> bool:
        return self.preset.kind is ServiceKind.EMBEDDING

    @property
    def cache(self) -> "PrefixCacheAdmin":
        """Calls on the prefix cache. Raises as `require`, and Unsupported."""
        self.require()
        return self.generator.cache

    def feature(self, kind: type[F]) -> F | None:
        """Feature of this type; None if the service has none."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @property
    def n_ctx(self) -> int:
        """Tokens per slot, as the engine serves them."""
        views = self.engine.snapshot().slots
        if views:
            return views[0].n_ctx
        return self.preset.slots.n_ctx

    @property
    def _loaded_model(self) -> ServedModel:
        """The model, loaded or not. Raises as `require_facts` does."""
        self.require_facts()
        assert self._model is not None
        return self._model

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model, loaded or not. Raises as `require_facts` does."""
        return self._loaded_model.facts

    @property
    def default_sampling(self) -> SamplingParams:
        """Sampling of a request that sets nothing. Raises as `require_facts` does."""
        return default_sampling(self.preset.sampling, self.facts.defaults)

    @property
    def template(self) -> TemplateFacts:
        """Facts of the chat template, also while the model is unloaded."""
        return self._loaded_model.template

    @property
    def text_processor(self) -> TextProcessor:
        """Text processor of the loaded model. Raises as `require` does."""
        self.require()
        processor = self._loaded_model.text_processor
        assert processor is not None
        return processor

    @property
    def health(self) -> ServiceHealth:
        """Current health: STALLED after silent steps, SWAPPING behind a closed gate."""
        if self._health is ServiceHealth.OK and self.gate.is_closed:
            return ServiceHealth.SWAPPING
        if self._health is ServiceHealth.UNLOADED and self.change is not None:
            return ServiceHealth.SWAPPING
        if self._health is ServiceHealth.OK and self.stall:
            return ServiceHealth.STALLED
        return self._health

    @property
    def stall(self) -> str:
        """The reason why requests make no progress; "" while they do."""
        if self.engine.stalled_s() > STALLED_S:
            return "the engine has work but finishes no step"
        if self._model is None or self._model.text_processor is None:
            return ""
        stuck = self._model.text_processor.threads.stuck_work(TEXT_STALLED_S)
        if not stuck:
            return ""
        return f"all threads for {stuck} are stuck"

    @property
    def is_unloaded(self) -> bool:
        """True from an idle unload until the model is loaded again."""
        return self._health is ServiceHealth.UNLOADED

    async def start(self) -> ModelFacts:
        """Load the model on the MLX thread. Raises its error."""
        self._dispatcher.bind(asyncio.get_running_loop())
        await asyncio.to_thread(restore_agents, self.agent_store, self.agent_registry)
        try:
            return await self._begin()
        except StackError as error:
            self._health = ServiceHealth.BROKEN
            self.trouble = error.message
            raise

    async def unload_model(self, limit_s: float, *, is_idle: bool = False) -> None:
        """End the engine, and drop everything that came from its model.

        The facts stay known of a model that `is_idle`, and comes back. Raises Broken for one that
        does not end within `limit_s`.
        """
        self._health = ServiceHealth.SWAPPING
        if is_idle:
            self._health = ServiceHealth.UNLOADED
        self._begin_unload()
        if not await ended(self.engine, limit_s):
            reason = f"the engine of {self.name} did not end within {limit_s:g} s"
            self.give_up(reason)
            raise Broken(reason)
        gone = Busy("the model is being changed; try again in a moment")
        self._dispatcher.fail_all(gone)
        if self._model is not None:
            self._model.close(gone)
        self.request_log.last_in_slot.clear()

    def rest(self, preset: Preset, engine: "AnyEngine") -> None:
        """Stay unloaded, with an engine that is not started, until `load_model`."""
        self.stats.add_engine(self.engine.snapshot().counters)
        self.preset = preset
        self.engine = engine
        self.name = preset.model.served_name

    async def load_model(self, preset: Preset, engine: "AnyEngine") -> ModelFacts:
        """Serve a preset by another engine. Raises its load error."""
        self.rest(preset, engine)
        return await self._begin()

    def give_up(self, reason: str) -> None:
        """Mark the service as broken: no engine is left."""
        self._health = ServiceHealth.BROKEN
        self.trouble = reason
        self._fail_all(reason)
        self.died.set()

    async def _begin(self) -> ModelFacts:
        """Load the model. Raises StackError, whatever failed."""
        try:
            return await self._load()
        except StackError:
            raise
        except Exception as error:
            log.exception("loading the model failed")
            reason = f"the model cannot be loaded: {type(error).__name__}: {error}"
            raise SetupError(reason) from error

    async def _load(self) -> ModelFacts:
        self.stats.load_began_at = time.monotonic()
        self.stats.bytes_before_load = await asyncio.to_thread(self.engine_factory.active_bytes)
        for feature in self.features:
            await feature.before_load(self.preset)
        # A caller that is cancelled does not cancel the load: its thread sets the future.
        facts = await asyncio.shield(asyncio.wrap_future(self.engine.start()))
        text_processor = await asyncio.to_thread(
            text_processor_of, self.engine.tokenizer, self.preset, facts
        )
        watchdog = asyncio.create_task(self._watch_engine())
        self._model = ServedModel(facts, text_processor, watchdog)
        if not self._is_embedding:
            for feature in self.features:
                await feature.after_load(self.preset, self.generator, facts)
        if self._health in (
            ServiceHealth.LOADING, ServiceHealth.SWAPPING, ServiceHealth.UNLOADED
        ):  # fmt: skip
            self._health = ServiceHealth.OK
        return facts

    def _begin_unload(self) -> None:
        """End what goes on beside requests, before the engine ends."""
        for feature in self.features:
            feature.before_unload()
        if self._model is not None:
            self._model.watchdog.cancel()

    async def stop(self, drain_s: float) -> None:
        """Drain requests for up to `drain_s` seconds and end the engine.

        Requests end with the drain, also while a step of the engine takes longer. The engine has
        PARKING_S more to end its step and park. One that is still loading, or stuck, is left
        behind: its thread is a daemon.
        """
        was_loading = self._health in (ServiceHealth.LOADING, ServiceHealth.SWAPPING)
        self._health = ServiceHealth.STOPPING
        self._begin_unload()
        stopping = asyncio.wrap_future(self.engine.stop(drain_s))
        await asyncio.wait({stopping}, timeout=0.0 if was_loading else drain_s)
        await asyncio.gather(
            self._end_requests(Loading(LEAVING)),
            asyncio.wait({stopping}, timeout=0.0 if was_loading else PARKING_S),
        )
        self.is_engine_left = not stopping.done()
        await self.write_histories()
        for feature in self.features:
            await feature.close()
        self.sleep.close()

    async def write_histories(self) -> None:
        """Write histories that the disk refused before; a failure is logged."""
        for agent in self.agent_store.refused:
            try:
                async with self.agent_locks.writing(agent):
                    await in_thread(self.agent_store.write_refused, agent)
            except StackError as error:
                log.warning("turns of agent %s are not on disk: %s", agent, error.message)

    async def _end_requests(self, reason: StackError) -> None:
        """Fail the requests that wait for the engine, then all others."""
        self._dispatcher.fail_all(reason)
        if self._model is not None:
            self._model.close(reason)
        await self.gate.emptied(ANSWER_S)
        self.gate.interrupt(reason)

    @contextmanager
    def open(self, request: Request, text_processor: TextProcessor) -> Iterator[RequestStream]:
        """Submit a request made with `text_processor`; leaving before its end cancels it.

        Raises as `require_model` does.
        """
        self.require_model(text_processor)
        engine = self.generator
        stream = RequestStream(
            request, self._dispatcher.open(request, text_processor.decode), engine
        )
        if request.agent is not None:
            lock = self.agent_locks.asking(request.agent)
        else:
            lock = nullcontext()
        awake = self.sleep.request() if self.sleep.command else nullcontext()
        with lock, awake:
            try:
                for feature in self.features:
                    feature.on_request(request)
                engine.submit(request)
                yield stream
            finally:
                self._dispatcher.close(request.id)
                stream.cancel()

    async def run_slot_command(self, command: SlotCommand) -> SlotCommandResult:
        """Save, restore, erase or evict, once the slot is idle.

        Raises BadRequest for a bad slot or name, NotFound, Damaged or Conflict for a file that
        cannot be restored; the slot then stays as it is.
        """
        self.require()
        if not 0 <= command.slot < self.preset.slots.count:
            raise InvalidSlot(command.slot, self.preset.slots.count)
        done = await asyncio.wrap_future(self.generator.run_slot_command(command))
        self.stats.note_slot_io(done)
        return done

    async def change_cache(self, change: Future[T]) -> T:
        """Await a manual change of the prefix cache, and count it."""
        done = await asyncio.wrap_future(change)
        self.stats.n_cache_changes += 1
        return done

    def require(self) -> None:
        """Raise Loading before the model is there, Broken if it failed."""
        self.require_facts()
        if self._health is ServiceHealth.UNLOADED:
            raise Loading("the model is unloaded; the next request for an answer loads it")

    def require_facts(self) -> None:
        """Raises as `require` does, but not while the model is only unloaded."""
        match self._health:
            case ServiceHealth.LOADING:
                raise Loading("Loading model")
            case ServiceHealth.SWAPPING:
                raise Loading("the model is being changed; try again in a moment")
            case ServiceHealth.BROKEN:
                raise Broken(f"{self.trouble}; see the service log")
            case ServiceHealth.STOPPING:
                raise Loading(LEAVING)

    def require_model(self, text_processor: TextProcessor) -> None:
        """Raise Busy when `text_processor` belongs to an unloaded model."""
        self.require()
        if text_processor is not self._loaded_model.text_processor:
            raise Busy(CHANGED)

    async def _watch_engine(self) -> None:
        """Watchdog: a dead or stuck engine fails all waiting requests."""
        while self.engine.is_alive():
            if (silent := self.engine.stalled_s()) > GIVE_UP_S:
                self._fail_all(f"no engine step has finished for {silent:.0f} s")
            await asyncio.sleep(WATCH_S)
        self.give_up(self.engine.trouble or "the engine's thread has died")

    def _fail_all(self, reason: str) -> None:
        message = f"{reason}; see the service log. A supervised service starts again by itself"
        n_failed = self._dispatcher.fail_all(Broken(message))
        if n_failed:
            log.error("%s: %d requests failed", reason, n_failed)


async def ended(engine: "AnyEngine", limit_s: float) -> bool:
    """End an engine without a drain; True if within `limit_s` seconds."""
    stopping = asyncio.wrap_future(engine.stop(0.0))
    await asyncio.wait({stopping}, timeout=limit_s)
    return stopping.done()
