"""Engine thread: the one that owns MLX, with inbox and events.

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
from math import inf
from typing import Any, TypeVar

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.core.commands import (
    CollectGarbage,
    FlushResult,
    GCResult,
    SlotCommand,
    SlotCommandResult,
)
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import (
    Broken,
    Busy,
    DeviceError,
    InvalidSlot,
    Loading,
    SetupError,
    StackError,
    describe_error,
)
from mlxstack.core.interfaces import AgentManifestStore, KVStore, Manifest, SlotFileStore
from mlxstack.core.kv_transfer import RemoteKV
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset, Speculation
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine import device
from mlxstack.engine.admin import PrefixCacheAdmin
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batching_check import (
    SELF_CHECK_S,
    BatchingCheck,
    CheckSteps,
    self_check,
)
from mlxstack.engine.decode.kernel_choice import choose_kernels
from mlxstack.engine.decode.row_stack import RowStacker
from mlxstack.engine.decode.width_costs import measure_widths
from mlxstack.engine.device_errors import MAX_DEVICE_ERRORS, device_error, raise_device_error
from mlxstack.engine.device_memory import DeviceMemory, MemoryPlan, memory_plan
from mlxstack.engine.distributed.group import RankGroup
from mlxstack.engine.distributed.mirrors import (
    MirroredContext,
    MirroredPrefixCache,
    MirroredRunner,
    MirroredStore,
)
from mlxstack.engine.draft_loading import load_drafts
from mlxstack.engine.idle_work import IdleWork, idle_work
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.kv_layouts import KVLayouts
from mlxstack.engine.kv.park import BackgroundSteps
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.kv.write_queue import copy_outcome
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.loop import Deliver, EngineLoop, Events
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.compiled_experts import compile_experts
from mlxstack.engine.model.length_rope import exact_ropes, keyed_by_length
from mlxstack.engine.model.padded_linear import pad_linear_layers
from mlxstack.engine.model.runner import ModelParts, ModelRunner, kv_bytes_per_token
from mlxstack.engine.slot_actions import SlotActionRunner
from mlxstack.engine.slots.kv_transfer import KVExchange
from mlxstack.engine.slots.remote_prefill import RemotePrefill
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.host.hardware import memory_of, this_memory
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.attention_kernels import PrefillAttention
from mlxstack.policy.drafts.ngram_draft_governor import UNMEASURED, WidthCosts
from mlxstack.policy.scheduling.scheduler import SchedulerLimits, limits_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Message = Callable[[], None]

MAX_FAILURES = 3
"""Failed steps in a row until the engine itself is broken."""
LOADING_S = 0.05
"""Seconds without messages between deadline checks while only KV loads."""


class EngineThread:
    """Engine of a language model. Every public method is thread-safe.

    The KV budget is a share of `memory_bytes`, by default of this computer or MLX_STACK_MEMORY.
    Saved contexts of agents are recorded in `manifests`; `remote` has KV of other services.
    `ranks` are those of a model that several machines compute together.
    """

    def __init__(
        self,
        preset: Preset,
        store: KVStore,
        slot_files: SlotFileStore,
        deliver: Deliver,
        memory_bytes: int | None = None,
        manifests: AgentManifestStore | None = None,
        remote: RemoteKV | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._preset = preset
        self._memory = this_memory(os.environ) if memory_bytes is None else memory_of(memory_bytes)
        self._device_memory = DeviceMemory(self._memory.total)
        self._store = store
        self._slot_files = slot_files
        self._manifests = manifests
        self._remote = remote
        self._ranks = ranks
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._snapshot = Snapshot()
        self._loaded: Future[ModelFacts] = Future()
        self._stopped: Future[None] = Future()
        self._open: set[Future[Any]] = set()
        self._drain_until: float | None = None
        self._stepped_at = time.monotonic()
        self._has_work = False
        self._n_device_errors = 0
        self._failure = ""
        self._n_fixed_rope: int | None = None
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._loop: EngineLoop
        self._idle: IdleWork
        self._disk_tier: DiskTier
        self._actions: SlotActionRunner
        self._exchange: KVExchange
        self.cache = PrefixCacheAdmin(self._do)
        self.load_progress = LoadProgress()
        self.tokenizer: Any = None

    def start(self) -> Future[ModelFacts]:
        """Load the model on the MLX thread. The future raises SetupError."""
        if self._ranks is not None:
            self._ranks.on_lost = self._fail_load
        self._thread.start()
        return self._loaded

    def submit(self, request: Request) -> None:
        """Admit a request; `deliver` gets its events, finished or failed last."""
        self._post(lambda: self._loop.submit(self._keyed(request)))

    def begin_early(self, request: Request, after: str) -> None:
        """Compute the expected next prompt after a request; see `EngineLoop.begin_early`."""

        def begin() -> None:
            if self._drain_until is None:
                self._loop.begin_early(self._keyed(request), after)

        self._post(begin)

    def _keyed(self, request: Request) -> Request:
        fixed = self._n_fixed_rope
        if fixed is None:
            return request
        return keyed_by_length(request, fixed)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; no-op once it is over."""
        self._post(lambda: self._loop.cancel(request_id))

    def run_slot_command(self, command: SlotCommand) -> Future[SlotCommandResult]:
        """Save, restore or erase an idle slot. The future raises StackErrors."""
        future: Future[SlotCommandResult] = Future()
        if not 0 <= command.slot < self._preset.slots.count:
            future.set_exception(InvalidSlot(command.slot, self._preset.slots.count))
            return future
        self._track(future)
        self._post(lambda: self._actions.run(command, future))
        return future

    def park(self) -> Future[FlushResult]:
        """Write all KV to disk that may be there."""
        return self._do(lambda loop: loop.slot_kv.park_all())

    def sweep(self, wanted: CollectGarbage) -> Future[GCResult]:
        """Collect garbage on disk, sparing files in use. The future raises StackErrors."""
        return self._await(lambda: self._disk_tier.writing.collect(wanted))

    def match_kv(self, prompt: PromptTokens, salt: str) -> Future[int]:
        """Number of cached tokens at the prompt's start."""
        return self._do(lambda _: self._exchange.match(prompt, salt))

    def export_kv(self, prompt: PromptTokens, salt: str) -> Future[Manifest]:
        """Write the first tokens' cached KV to disk. The future raises StackErrors."""
        return self._begin(lambda done: self._exchange.export(prompt, salt, done))

    def import_kv(self, manifest: Manifest) -> Future[int]:
        """Import KV files of a service; their tokens. The future raises Damaged."""
        return self._begin(lambda done: self._exchange.adopt(manifest, done))

    def reserve_disk(self, n_bytes: int) -> Future[GCResult]:
        """Make room for a service's files. The future raises DiskFull, Busy."""
        return self._await(lambda: self._disk_tier.writing.make_room((), n_bytes))

    def after_writes(self) -> Future[None]:
        """Wait until all pending writes are on disk, or have failed."""
        return self._await(lambda: self._disk_tier.writing.after(lambda: None))

    def snapshot(self) -> Snapshot:
        """The state after the last step, an immutable value."""
        return self._snapshot

    def stalled_s(self) -> float:
        """Watchdog: seconds without a finished step despite work; 0 when idle."""
        if self._has_work:
            return time.monotonic() - self._stepped_at
        return 0.0

    def is_alive(self) -> bool:
        """Whether the thread runs, and all other ranks do."""
        return self._thread.is_alive() and not self.trouble

    @property
    def trouble(self) -> str:
        """Why the engine ended or lost another rank; empty while it serves."""
        return self._lost_rank or self._failure

    @property
    def _lost_rank(self) -> str:
        return self._ranks.lost if self._ranks is not None else ""

    def stop(self, drain_s: float) -> Future[None]:
        """Drain requests for at most `drain_s` seconds, then end the thread."""
        if self._thread.ident is None and not self._stopped.done():
            self._stopped.set_result(None)
        until = time.monotonic() + drain_s
        if self._lost_rank:
            # The thread may wait for another rank for ever.
            gone: Future[None] = Future()
            gone.set_result(None)
            return gone

        def begin() -> None:
            self._drain_until = until
            self._loop.end_early()

        self._post(begin)
        return self._stopped

    def _do(self, work: Callable[[EngineLoop], T]) -> Future[T]:
        """Run `work` between two steps; publish a snapshot, then set its result."""

        def run(done: Future[T]) -> None:
            result = work(self._loop)
            self._publish()
            done.set_result(result)

        return self._begin(run)

    def _await(self, begin: Callable[[], Future[T]]) -> Future[T]:
        """Outcome of what `begin` begins between two steps."""
        return self._begin(lambda done: copy_outcome(begin(), done))

    def _begin(self, work: Callable[[Future[T]], None]) -> Future[T]:
        """Begin `work` between two steps; it settles the future then or later."""
        future: Future[T] = Future()

        def begin() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                work(future)
            except Exception as error:
                future.set_exception(describe_error(error, "an operation on KV"))
                raise_device_error(error)

        self._track(future)
        self._post(begin)
        return future

    def _track(self, future: Future[Any]) -> None:
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._stopped.done():
            self._fail_open()

    def _fail_load(self, error: StackError) -> None:
        """Fail a load that may wait for a lost rank; no-op later."""
        with suppress(InvalidStateError):
            self._loaded.set_exception(error)

    def _fail_open(self) -> None:
        """Fail all open futures of an engine that has ended."""
        for future in tuple(self._open):
            with suppress(InvalidStateError):
                future.set_exception(Loading("the model is being unloaded; try again soon"))

    def _post(self, message: Message) -> None:
        if not self._has_work:
            self._stepped_at = time.monotonic()
            self._has_work = True
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            self._live()
        finally:
            self._unload()
            if self._ranks is not None:
                self._ranks.end()
            # Without this MLX aborts the process at exit: its stream threads are still running.
            mx.clear_streams()
            self._stopped.set_result(None)
            self._fail_open()

    def _unload(self) -> None:
        """Drop all references to arrays."""
        # A step may be in flight whose requests were all cancelled; this waits for it.
        self._device_memory.restore()
        for name in ("_loop", "_idle", "_disk_tier", "_actions", "_exchange"):
            self.__dict__.pop(name, None)
        self._inbox = queue.SimpleQueue()
        gc.collect()
        device.settle()

    def _live(self) -> None:
        try:
            facts = self._load()
        except Exception as error:
            device.clear_traceback_frames(error)
            with suppress(InvalidStateError):
                self._loaded.set_exception(device_error(error) or error)
            return
        with suppress(InvalidStateError):
            self._loaded.set_result(facts)
        try:
            self._serve()
            if not self.trouble:
                self._loop.slot_kv.park_all()
        finally:
            self._disk_tier.close()

    def _load_model(self) -> LoadedModel:
        preset = self._preset
        if self._ranks is not None:
            divided = loader.load(
                preset.model, preset.kv, self._ranks.open(preset), self.load_progress
            )
            if exact_ropes(divided.model) is not None:
                raise SetupError(
                    f"the rotary embedding of {preset.model.id} depends on the length of a text "
                    "(rope_scaling `dynamic`), which several machines do not compute; remove hosts"
                )
            self._ranks.compare(divided.facts.identity)
            return divided
        loaded = loader.load(preset.model, preset.kv, progress=self.load_progress)
        self._n_fixed_rope = exact_ropes(loaded.model)
        if not device.has_gpu():
            pad_linear_layers(loaded.model)
        return loaded

    def _load(self) -> ModelFacts:
        preset = self._preset
        loaded = self._load_model()
        loader.check_context(loaded.facts, preset.slots.n_ctx)
        factory = CacheFactory(loaded.model, preset.kv)
        self._device_memory.apply()
        check = self._self_check(loaded, factory)
        # Its random KV is as long as the model's windows.
        device.release()
        facts = self._identified(loaded.facts, check)
        self.tokenizer = loaded.tokenizer
        is_drafting = self._is_drafting(check)
        drafts = load_drafts(
            preset, loaded, check, self._self_check, self.load_progress, has_ranks=bool(self._ranks)
        )
        key = facts.identity.key()
        n_bytes = facts.n_bytes + drafts.n_bytes
        limits = self._device_memory.limits()
        plan = memory_plan(preset, replace(facts, n_bytes=n_bytes), self._memory, limits)
        alone = ModelRunner(loaded.model)
        bytes_per_token = kv_bytes_per_token(alone, factory)
        if self._ranks is not None:
            plan = self._ranks.agree(check, plan, bytes_per_token, is_measured=is_drafting)
        costs = self._width_costs(alone, factory, is_drafting)
        target = drafts.model.target if drafts.model else None
        parked, slots, runner, store = self._parts(loaded.model, check, factory, key, plan, target)
        layouts = KVLayouts(None if self._ranks else runner, factory)
        tier = DiskTier(store, self._slot_files, parked, layouts, self._post, self._manifests)
        tier.open()
        pieces = BackgroundSteps(self._post, lambda: self._loop.batch.is_busy)
        slot_kv = SlotKVManager(
            slots,
            parked,
            tier,
            pieces,
            preset.agents.persist,
            bytes_per_token + (drafts.model.bytes_beside if drafts.model else 0),
            plan.array_limit,
        )
        slot_kv.images = loaded.images
        self._exchange = KVExchange(slot_kv)
        rules = self._rules(plan, alone, factory)
        stacker = _stacker(check, runner, slot_kv)
        self._loop = EngineLoop(
            Batch(runner, costs, drafts.model, rules.prefill, stacker, loaded.images),
            slot_kv,
            preset.slots.n_ctx,
            rules,
            plan.max_cached_bytes,
            is_drafting=is_drafting,
            remote=RemotePrefill(self._remote, self._post) if self._remote is not None else None,
        )
        self._disk_tier = tier
        self._actions = SlotActionRunner(self._loop, self._publish)
        if check.why_not:
            log.warning("decoding slot by slot: %s", check.why_not)
        self._check = check
        self._device_memory.wire(preset.device.wired, plan.planned_bytes)
        self._publish()
        return facts

    def _width_costs(self, alone: ModelRunner, made: CacheFactory, is_drafting: bool) -> WidthCosts:
        """Costs of passes by width, once experts are compiled where that pays."""
        if self._ranks is None:
            compile_experts(alone.model, made, self._preset.slots.count, is_drafting=is_drafting)
        if is_drafting:
            return measure_widths(alone, made)
        return UNMEASURED

    def _rules(self, plan: MemoryPlan, alone: ModelRunner, made: CacheFactory) -> SchedulerLimits:
        attention = PrefillAttention(plan.score_bytes, max_score_bytes=plan.max_score_bytes)
        # A follower of another generation computes the same chunks with other kernels.
        if self._ranks is None:
            attention = choose_kernels(alone, made, attention)
        return limits_of(self._preset, plan.kv_budget, attention)

    def _identified(self, facts: ModelFacts, check: BatchingCheck) -> ModelFacts:
        """Facts with the identity of the KV of this rank."""
        size = self._ranks.size if self._ranks is not None else 1
        identity = loader.kv_identity(facts.identity, check.kv, self._preset.kv, size=size)
        return replace(facts, identity=identity)

    def _parts(
        self,
        model: Any,
        check: BatchingCheck,
        factory: CacheFactory,
        key: str,
        plan: MemoryPlan,
        parts: ModelParts | None,
    ) -> tuple[PrefixCache, list[SlotContext], ModelRunner, KVStore]:
        """Prefix cache, contexts, runner and store, mirrored on other ranks."""
        spec = self._preset.prefix_cache
        budget = plan.kv_budget
        ranks = self._ranks
        each = range(self._preset.slots.count)
        start = factory.quantized_start
        if ranks is None:
            is_batching = check.is_batching
            is_ragged = check.is_ragged
            runner = ModelRunner(model, is_batching=is_batching, is_ragged=is_ragged, parts=parts)
            cache = PrefixCache(key, spec, budget, start)
            return cache, [SlotContext(factory) for _ in each], runner, self._store
        return (
            MirroredPrefixCache(ranks, key, spec, budget, start),
            [MirroredContext(factory, ranks) for _ in each],
            MirroredRunner(model, ranks, is_batching=check.is_batching, is_ragged=check.is_ragged),
            MirroredStore(self._store, ranks),
        )

    def _is_drafting(self, check: BatchingCheck) -> bool:
        return check.can_draft and self._preset.speculation is Speculation.AUTO

    def _self_check(self, loaded: LoadedModel, factory: CacheFactory) -> BatchingCheck:
        # Ranks have to come to one verdict, so that none of them runs out of time.
        steps = CheckSteps(self.load_progress, SELF_CHECK_S if self._ranks is None else inf)
        return self_check(loaded.model, factory, loaded.facts.n_vocab, steps)

    def _serve(self) -> None:
        has_ranks = self._ranks is not None
        self._idle = idle_work(self._loop, self._preset, self._publish, has_ranks=has_ranks)
        n_failures = 0
        while not (self.trouble or self._is_done()):
            n_generated = self._loop.stats.counters.n_generated_tokens
            try:
                self._handle_messages()
                self._loop.step(self._publish_events)
                if self._ranks is not None:
                    self._ranks.flush()
                n_failures = 0
                self._check_device(n_generated)
                if 0 < self._device_memory.planned_bytes < mx.get_active_memory():
                    self._device_memory.log_excess()
            except DeviceError as error:
                self._lose_kv(error)
            except Exception as error:
                n_failures += 1
                log.exception("engine step failed")
                self._loop.fail_all(Broken(f"the engine failed and was reset: {error}"))
                self._loop.flush(self._publish_events)
                if n_failures >= MAX_FAILURES:
                    raise
            self._publish()
        if self.trouble:
            self._loop.end_all(Broken(self.trouble))
            self._loop.flush(self._publish_events)

    def _check_device(self, n_generated: int) -> None:
        """Forget device errors once a token was decoded. Raises one that surfaces late."""
        if self._n_device_errors and self._loop.stats.counters.n_generated_tokens > n_generated:
            device.synchronize()
            self._n_device_errors = 0

    def _lose_kv(self, error: DeviceError) -> None:
        """Fail requests in slots; end the engine at the second error."""
        self._n_device_errors += 1
        log.error("%s", error.message)
        self._loop.lose_kv(error)
        self._loop.flush(self._publish_events)
        if self._n_device_errors >= MAX_DEVICE_ERRORS:
            self._failure = error.message

    def _handle_messages(self) -> None:
        """Handle all messages; wait for one when there is nothing to do."""
        if not self._is_busy and self._inbox.empty():
            self._loop.release_buffers()
            self._has_work = False
            self._handle(self._idle.next_message(self._inbox))
        elif self._loop.is_only_loading:
            with suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=LOADING_S))
        # Messages posted by these wait for the next step: long work comes in pieces.
        for _ in range(self._inbox.qsize()):
            self._handle(self._inbox.get_nowait())

    @property
    def _is_busy(self) -> bool:
        return self._loop.has_work or self._loop.has_early_turn

    def _handle(self, message: Message) -> None:
        self._has_work = True
        self._stepped_at = time.monotonic()
        message()

    def _is_done(self) -> bool:
        if self._drain_until is None:
            return False
        if time.monotonic() >= self._drain_until:
            self._loop.end_all(Busy("the model is stopping; try again in a moment"))
            self._loop.flush(self._publish_events)
        return not (self._loop.has_work or self._loop.is_holding)

    def _publish_events(self, events: Events) -> None:
        """Publish a snapshot that includes the events before they are delivered."""
        self._publish()
        self._deliver(events)

    def _publish(self) -> None:
        self._stepped_at = time.monotonic()
        self._has_work = self._is_busy or not self._inbox.empty()
        now = self._loop.snapshot()
        ranks = self._ranks
        if ranks is not None:
            sent = replace(now.counters, n_rank_records=ranks.n_records, n_rank_bytes=ranks.n_bytes)
            now = replace(now, counters=sent)
        self._snapshot = replace(
            now,
            is_batching=self._check.is_batching and self._preset.batch.enabled,
            why_not_batching=self._check.why_not,
            kv_budget_bytes=self._loop.slot_kv.prefix_cache.budget,
            is_drafting=self._loop.is_drafting,
            draft_model=self._loop.draft_model,
        )


def _stacker(
    check: BatchingCheck, runner: ModelRunner, slot_kv: SlotKVManager
) -> RowStacker | None:
    can_stack = check.can_stack and runner.can_stack
    return RowStacker(slot_kv.has_room) if can_stack else None
