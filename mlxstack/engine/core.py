"""The engine: one thread that owns MLX, fed through an inbox, answering with events.

Load, inference, evaluation and saving of arrays happen on this thread and nowhere else.
"""

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.core.commands import (
    CacheCommand,
    CollectGarbage,
    FlushResult,
    GCResult,
    ReclaimMemory,
    SlotCommand,
    SlotCommandResult,
)
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import BadRequest, Broken, Busy, Loading, StackError
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.ports import AgentManifestStore, KVStore, SlotFileStore
from mlxstack.core.preset import Preset, Speculation
from mlxstack.core.request import Request
from mlxstack.engine import admin, buffer_cache, footprint, idle_wait
from mlxstack.engine.device_memory import DeviceMemory, memory_plan
from mlxstack.engine.futures import copy_outcome
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.incremental_pack import BackgroundSteps
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.kv.slot_preparation import SlotKVManager
from mlxstack.engine.model import loader
from mlxstack.engine.model.batching_check import BatchingCheck, self_check
from mlxstack.engine.model.cache_factory import CacheFactory, kv_bytes_per_token
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.engine.model.width_costs import measure_widths
from mlxstack.engine.slot_actions import SlotActionRunner
from mlxstack.engine.step import Deliver, EngineLoop, Events
from mlxstack.host.memory_budget import this_memory
from mlxstack.policy.scheduler_limits import limits_of

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""So many broken turns in a row mean that the engine itself is broken."""


class EngineCore:
    """Thread-safe: every public method may be called from any thread.

    `memory_bytes`, by default this machine's or what MLX_STACK_MEMORY says, is what the preset's
    budget is a share of; what is saved of the agents is noted in `manifests`.
    """

    def __init__(
        self,
        preset: Preset,
        store: KVStore,
        slot_files: SlotFileStore,
        deliver: Deliver,
        memory_bytes: int | None = None,
        manifests: AgentManifestStore | None = None,
    ) -> None:
        self._preset = preset
        self._total = this_memory(os.environ).total if memory_bytes is None else memory_bytes
        self._device_memory = DeviceMemory(self._total)
        self._store = store
        self._slot_files = slot_files
        self._manifests = manifests
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[idle_wait.Message] = queue.SimpleQueue()
        self._snapshot = Snapshot()
        self._loaded: Future[ModelFacts] = Future()
        self._stopped: Future[None] = Future()
        self._owed: set[Future[Any]] = set()
        self._drain_until: float | None = None
        self._turned_at = time.monotonic()
        self._has_work = False
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._turns: EngineLoop
        self._archive: DiskTier
        self._actions: SlotActionRunner
        self.tokenizer: Any = None

    def start(self) -> Future[ModelFacts]:
        """Load the model on the MLX thread. The future raises SetupError when that fails."""
        self._thread.start()
        return self._loaded

    def submit(self, request: Request) -> None:
        """Events of this ask come through `deliver`, ending with Finished or Failed."""
        self._post(lambda: self._turns.submit(request))

    def cancel(self, request_id: str) -> None:
        """Leads to Finished(CANCELLED), unless the ask is over already."""
        self._post(lambda: self._turns.cancel(request_id))

    def run_slot_command(self, act: SlotCommand) -> Future[SlotCommandResult]:
        """Save, restore or erase a slot once it is idle. The future raises StackErrors."""
        future: Future[SlotCommandResult] = Future()
        if not 0 <= act.slot < self._preset.slots.count:
            future.set_exception(BadRequest("Invalid slot ID", "id_slot"))
            return future
        self._owe(future)
        self._post(lambda: self._actions.run(act, future))
        return future

    def run_cache_command(self, command: CacheCommand) -> Future[Any]:
        """Do something with the KV memory between two turns; see `engine.chores.do`."""
        return self._do(lambda: self._tend(command))

    def park(self) -> Future[FlushResult]:
        """Bring all KV to disk that may be there, before the engine ends."""
        # There are no turns before the model is loaded.
        return self._do(lambda: self._turns.slot_kv.park_all())  # noqa: PLW0108

    def sweep(self, wanted: CollectGarbage) -> Future[GCResult]:
        """Delete from the disk by age and bytes, never what is in use. The future raises errors."""
        future: Future[GCResult] = Future()

        def begin() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                copy_outcome(self._archive.gc.collect(wanted), future)
            except StackError as error:
                future.set_exception(error)

        self._owe(future)
        self._post(begin)
        return future

    def snapshot(self) -> Snapshot:
        """The state after the last turn, an immutable value."""
        return self._snapshot

    def stalled_s(self) -> float:
        """Seconds without a finished turn while there is work; 0 when idle."""
        return time.monotonic() - self._turned_at if self._has_work else 0.0

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, drain_s: float) -> Future[None]:
        """Let running asks finish for at most `drain_s` seconds, then end the thread."""
        until = time.monotonic() + drain_s
        self._post(lambda: setattr(self, "_drain_until", until))
        return self._stopped

    def _tend(self, command: CacheCommand) -> Any:
        done = admin.do(command, self._turns.slot_kv, self._turns.ledger)
        if isinstance(command, ReclaimMemory):
            self._turns.release_buffers()
        return done

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` between two turns. An engine that has ended fails it."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._owe(future)
        self._post(run)
        return future

    def _owe(self, future: Future[Any]) -> None:
        self._owed.add(future)
        future.add_done_callback(self._owed.discard)
        if self._stopped.done():
            self._fail_owed()

    def _fail_owed(self) -> None:
        """Nobody waits for an engine that has ended."""
        for future in tuple(self._owed):
            with suppress(InvalidStateError):
                future.set_exception(Loading("the model is being unloaded; try again soon"))

    def _post(self, message: idle_wait.Message) -> None:
        if not self._has_work:
            self._turned_at = time.monotonic()
            self._has_work = True
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            self._live()
        finally:
            self._unload()
            # Without this MLX aborts the process at exit: its stream threads are still running.
            mx.clear_streams()
            self._stopped.set_result(None)
            self._fail_owed()

    def _unload(self) -> None:
        """Let go of everything that holds arrays."""
        for name in ("_turns", "_archive", "_actions"):
            self.__dict__.pop(name, None)
        self._inbox = queue.SimpleQueue()
        gc.collect()
        # A step may be in flight whose asks were all cancelled; this waits for it.
        self._device_memory.restore()
        buffer_cache.release()

    def _live(self) -> None:
        try:
            facts = self._load()
        except Exception as error:
            footprint.clear_traceback_frames(error)
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(facts)
        try:
            self._serve()
            self._turns.slot_kv.park_all()
        finally:
            self._archive.close()

    def _load(self) -> ModelFacts:
        preset = self._preset
        loaded = loader.load(preset.model, preset.kv)
        maker = CacheFactory(loaded.model, preset.kv)
        log.info("trying how %s decodes and rewinds", preset.model.id)
        self._device_memory.apply()
        verdict = self_check(loaded.model, maker, loaded.facts.n_vocab)
        # Its random KV is as long as the model's windows.
        buffer_cache.release()
        facts = replace(loaded.facts, identity=_identity(loaded.facts, verdict, preset))
        self.tokenizer = loaded.tokenizer
        key = facts.identity.key()
        plan = memory_plan(preset, facts, self._total, self._device_memory.limits())
        memory = PrefixCache(key, preset.prefix_cache, plan.kv_budget, maker.quantized_start)
        self._archive = DiskTier(self._store, self._slot_files, memory, key, self._post)
        self._archive.manifests = self._manifests
        if preset.prefix_cache.enabled and preset.prefix_cache.disk.enabled:
            self._archive.open()
        slots = [SlotContext(maker) for _ in range(preset.slots.count)]
        pieces = BackgroundSteps(self._post, lambda: self._turns.batch.is_busy)
        slot_kv = SlotKVManager(slots, memory, self._archive, pieces, preset.agents.persist)
        runner = ModelRunner(
            loaded.model, is_batching=verdict.is_batching, is_ragged=verdict.is_ragged
        )
        slot_kv.bytes_per_token = kv_bytes_per_token(runner, maker)
        slot_kv.array_limit = plan.array_limit
        limits = limits_of(preset, plan.kv_budget, plan.score_bytes)
        self._turns = EngineLoop(runner, slot_kv, preset.slots.n_ctx, limits)
        self._turns.max_cached_bytes = plan.max_cached_bytes
        self._actions = SlotActionRunner(self._turns, self._archive, pieces, self._publish)
        if verdict.can_draft and preset.speculation is Speculation.AUTO:
            self._turns.is_drafting = True
            self._turns.batch.costs = measure_widths(runner, maker)
        if verdict.why_not:
            log.warning("decoding slot by slot: %s", verdict.why_not)
        self._verdict = verdict
        self._publish()
        return facts

    def _serve(self) -> None:
        n_failures = 0
        while not self._is_done():
            try:
                self._listen()
                self._turns.step(self._tell)
                n_failures = 0
            except Exception as error:
                n_failures += 1
                log.exception("a turn broke")
                self._turns.fail_all(Broken(f"the engine broke and was reset: {error}"))
                self._turns.flush(self._tell)
                if n_failures >= MOST_FAILURES:
                    raise
            self._publish()

    def _listen(self) -> None:
        """Take everything from the inbox; wait for something when there is nothing to do."""
        if not self._turns.has_work and self._inbox.empty():
            self._turns.release_buffers()
            self._has_work = False
            self._obey(idle_wait.wait(self._inbox, self._turns.slot_kv.memory))
        # What these put in is for after the next turn: long work comes in pieces.
        for _ in range(self._inbox.qsize()):
            self._obey(self._inbox.get_nowait())

    def _obey(self, message: idle_wait.Message) -> None:
        self._has_work = True
        self._turned_at = time.monotonic()
        message()

    def _is_done(self) -> bool:
        if self._drain_until is None:
            return False
        if time.monotonic() >= self._drain_until:
            self._turns.end_all(Busy("the model is stopping; try again in a moment"))
            self._turns.flush(self._tell)
        return not (self._turns.has_work or self._turns.is_holding)

    def _tell(self, events: Events) -> None:
        """Whoever hears of an event and then looks sees a picture in which it has happened."""
        self._publish()
        self._deliver(events)

    def _publish(self) -> None:
        self._turned_at = time.monotonic()
        self._has_work = self._turns.has_work or not self._inbox.empty()
        self._snapshot = replace(
            self._turns.snapshot(),
            is_batching=self._verdict.is_batching and self._preset.batch.enabled,
            why_not_batching=self._verdict.why_not,
            kv_budget_bytes=self._turns.slot_kv.memory.budget,
        )


def _identity(facts: ModelFacts, verdict: BatchingCheck, preset: Preset) -> Any:
    kv = preset.kv
    precision = f"{kv.bits}/{kv.group_size}@{kv.quantized_start}" if kv.bits < 16 else "16"
    return replace(facts.identity, kv=f"{precision} {verdict.kv}")
