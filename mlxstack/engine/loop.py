"""Engine loop: schedule, decode, prefill a chunk, deliver events.

No thread and no queue here: `EngineLoop` is driven by `engine.thread`, and by tests directly.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.core.engine_events import (
    Event,
    FinishReason,
    KVSource,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    TokenSampled,
)
from mlxstack.core.engine_snapshot import RequestPhase, Snapshot
from mlxstack.core.errors import Broken, Busy, DeviceError, StackError, describe_error
from mlxstack.core.request import Request
from mlxstack.engine import device
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.kernel_choice import without_forced
from mlxstack.engine.decode.prefill import PreparedChunk, compute_chunks, prepare_chunk, row_of
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.idle_work import IdleWork
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.slots.answer_rule import AnswerRules, no_rule
from mlxstack.engine.slots.kv_provider import KVProvider
from mlxstack.engine.slots.prefix_lookup import PrefixOverlapCache
from mlxstack.engine.slots.request_state import PhaseClocks, RequestState
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.engine.stats import EngineStats, batch_counters, batch_facts, build_snapshot
from mlxstack.policy.kv.reuse_plan import ReusePlan
from mlxstack.policy.scheduling import scheduler, scheduler_state
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, stall_left
from mlxstack.policy.scheduling.scheduler import COMPUTING, Action, AssignSlot, Expire, PrefillChunk
from mlxstack.policy.scheduling.scheduler_state import ACTIVE, SchedulerState, SlotState

log = logging.getLogger(__name__)

GROWTH_EVERY = 64
GROWTH_EVERY_PROPOSING = 8
"""Steps between memory checks for growing rows; proposals add up to 17 tokens."""
GROWTH = 256
"""Tokens admitted ahead per row: the growth of mlx-lm's caches."""

Events = tuple[Event, ...]
LastEvent = RequestFinished | RequestFailed
Deliver = Callable[[Events], None]
Advance = Callable[[], list[TokenSampled]]
Work = Callable[[SlotContext], None]
OnLost = Callable[[StackError], None]


class EngineLoop:
    """Serving engine: scheduler, contexts, batch. One thread, no locks.

    MLX's cache of freed buffers is emptied at the end of a step when it exceeds
    `max_cached_bytes`.
    """

    def __init__(
        self,
        batch: Batch,
        slot_kv: SlotKVManager,
        n_ctx: int,
        limits: scheduler.SchedulerLimits,
        max_cached_bytes: int = device.MIN_BOUND,
    ) -> None:
        self.slots = slot_kv.slots
        self._state = scheduler_state.initial_state(len(self.slots))
        self._works: dict[str, tuple[Work, OnLost | None]] = {}
        self.n_ctx = n_ctx
        self._limits = limits
        self.kv_providers: list[KVProvider] = [slot_kv]
        """Asked in this order for KV that a prompt lacks."""
        self.transforms: list[Callable[[Request], Request]] = []
        """Applied to each request before anything else."""
        self.answer_rules: AnswerRules = no_rule
        self.facts = Snapshot()
        """Facts of the load, which each snapshot repeats."""
        self.slot_kv = slot_kv
        self.batch = batch
        self._requests: dict[str, RequestState] = {}
        self._phases = PhaseClocks(self._requests)
        self._last: dict[int, RequestState] = {}
        self._matches = PrefixOverlapCache(self.slots, self._requests, limits.prefill.block)
        self._lookup = scheduler.Lookup(
            self._matches.shared, self._matches.promised, self.slot_kv.need
        )
        self.stats = EngineStats()
        self.idle_works: list[IdleWork] = []
        """Work for steps without a prompt, in this order."""
        self._events: list[Event] = []
        self._n_steps = 0
        self.max_cached_bytes = max_cached_bytes

    @property
    def has_work(self) -> bool:
        """Whether a request or a slot action is to be done."""
        return bool(self._requests or self._state.actions)

    @property
    def is_busy(self) -> bool:
        """Whether a step has work to do, idle work included."""
        return self.has_work or any(work.is_pending for work in self.idle_works)

    @property
    def state(self) -> SchedulerState:
        """State of the scheduler."""
        return self._state

    @property
    def prefill_policy(self) -> PrefillPolicy:
        """Bounds of prefill chunks."""
        return self._limits.prefill

    @property
    def is_only_loading(self) -> bool:
        """Whether all requests with slots wait for KV to arrive."""
        states = {slot.state for slot in self._state.slots}
        is_computing = states & {SlotState.PREFILLING, SlotState.RUNNING}
        return SlotState.LOADING in states and not (is_computing or self.batch.is_busy)

    @property
    def idle_slots(self) -> list[int]:
        """Slots that are idle but not empty, the longest unused first."""
        return scheduler_state.idle_slots(self._state)

    @property
    def is_holding(self) -> bool:
        """Whether a slot action runs in some slot."""
        return any(slot.state is SlotState.HELD for slot in self._state.slots)

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it when the queue is full."""
        request = self.prepared(request)
        if self.slot_kv.need(request) > self.slot_kv.prefix_cache.budget:
            self._refuse(request, self.slot_kv.too_big(request))
            return
        now = time.monotonic()
        if scheduler.is_full(self._state, request, now, self._limits, self._lookup):
            wait = scheduler.retry_after(self._state, self.stats.seconds_per_request)
            n = len(self._state.waiting)
            self._refuse(request, Busy(f"all slots are busy and {n} requests wait", wait))
            return
        self._requests[request.id] = RequestState(request)
        self.stats.count(n_requests=1)
        self._state = scheduler_state.enqueue(self._state, request)

    def prepared(self, request: Request) -> Request:
        """The request with what the engine adds to it."""
        for transform in self.transforms:
            request = transform(request)
        return request

    def end_idle_work(self, slot: int | None = None) -> None:
        """End idle work, in a slot or in all; its KV stays."""
        for work in self.idle_works:
            work.end(slot)

    def cancel(self, request_id: str) -> None:
        """Stop a request in any phase; its KV stays in the slot."""
        request_state = self._requests.get(request_id)
        if request_state is not None:
            self._end(request_state, request_state.finish(FinishReason.CANCELLED, time.monotonic()))

    def when_idle(
        self, action_id: str, slot: int, work: Work, on_lost: OnLost | None = None
    ) -> None:
        """Call `work` with the idle slot's context, and hold the slot.

        `release` or `renew` ends the action. If the context is cleared by an error before the
        action begins, only `on_lost` is called, where there is one.
        """
        self._works[action_id] = work, on_lost
        entry = scheduler_state.SlotAction(action_id, slot, time.monotonic())
        self._state = scheduler_state.enqueue_action(self._state, entry)

    def release(self, slot: int) -> None:
        """Make a held slot idle again."""
        now = time.monotonic()
        self._state = scheduler_state.release_slot(self._state, slot, len(self.slots[slot]), now)

    def set_context(self, slot: int, n_tokens: int, n_kept: int) -> None:
        """Note a changed context of an idle slot; `n_kept` tokens stayed."""
        self._state = scheduler_state.set_context(self._state, slot, n_tokens, n_kept)

    def renew(self, slot: int) -> None:
        """Make a held slot idle again, with a context from elsewhere."""
        self._last.pop(slot, None)
        now = time.monotonic()
        self._state = scheduler_state.reset_slot(self._state, slot, len(self.slots[slot]), now)

    def last_request(self, slot: int) -> Request | None:
        """The last request that this slot has served."""
        last = self._last.get(slot)
        return last.request if last else None

    def agent_in(self, slot: int) -> str | None:
        """Name of the last agent in this slot, as in the snapshot."""
        last = self._last.get(slot)
        return last.request.display_name if last else None

    def step(self, deliver: Deliver) -> None:
        """Run a step; events are delivered before prefill and at the end."""
        self._n_steps += 1
        self._schedule()
        if any(isinstance(event, TokenSampled) for event in self._events):
            # A first token that needed no pass waits for none.
            self.flush(deliver)
        speed = self.stats.speed
        policy = self._limits.prefill
        stalled = self.batch.inputs.stalled
        self._state, chunk = scheduler.next_prefill_chunk(self._state, speed, policy, stalled)
        work = None
        if chunk is None:
            work = next((work for work in self.idle_works if work.has_chunk()), None)
        is_proposing = self.batch.proposer.is_active
        if self._n_steps % (GROWTH_EVERY_PROPOSING if is_proposing else GROWTH_EVERY) == 0:
            self._admit_growth()
        decode = partial(self.batch.step, is_prefilling=chunk is not None)
        self._decode(self.batch.sync if chunk and chunk.is_awaited else decode, deliver)
        if chunk is not None:
            # Before the chunk, so that it does not delay these tokens.
            self.flush(deliver)
            self._phases.note(self._state.slots, chunk.slots)
            self._prefill(chunk)
            self._phases.note(self._state.slots)
        elif work is not None:
            # No step may be in flight, whose tokens the chunk would delay.
            self._decode(self.batch.sync)
            self.flush(deliver)
            work.run_chunk()
        if mx.get_cache_memory() > self.max_cached_bytes:
            self.release_buffers()
        self.flush(deliver)
        is_busy = self.batch.is_busy or any(
            slot.state is SlotState.PREFILLING for slot in self._state.slots
        )
        self.slot_kv.maintain(self._n_steps, self.idle_slots, is_busy=is_busy)

    def release_buffers(self) -> None:
        """Empty MLX's buffer cache, with no step in flight."""
        self._decode(self.batch.sync)
        device.release()

    def limit_kv(self, n_bytes: int) -> None:
        self._limits = replace(self._limits, max_bytes=self.slot_kv.limit(n_bytes))

    def flush(self, deliver: Deliver) -> None:
        """Deliver the events so far."""
        if self._events:
            events = tuple(self._events)
            self._events = []
            deliver(events)

    def end_all(self, error: StackError) -> None:
        """Fail every request with this error; computed KV stays in the slots."""
        for request_state in list(self._requests.values()):
            self._end(request_state, RequestFailed(request_state.request.id, error))

    def fail_all(self, error: StackError) -> None:
        """Fail every request with an error; other slots stay."""
        self.end_idle_work()
        self._fail_these(list(self._requests), error)

    def lose_kv(self, error: DeviceError) -> None:
        """Fail requests in slots; drop KV that failed kernels may have written."""
        # An error surfaces a step late: a request that ended in the last step counts too.
        recent = {slot for slot, x in self._last.items() if x.ended_step >= self._n_steps - 1}
        suspects = {slot for work in self.idle_works for slot in work.slots}
        suspects |= recent.intersection(self.idle_slots)
        for slot in recent:
            self.slot_kv.drop_aside(slot)
        self.end_idle_work()
        self._fail_these(
            [
                request_state.request.id
                for request_state in self._requests.values()
                if request_state.is_assigned
            ],
            error,
        )
        for slot in suspects:
            self.end_idle_work(slot)
            self.clear_slot(slot, error)
            self.renew(slot)

    def _fail_these(self, request_ids: list[str], error: StackError) -> None:
        self.batch.reset()
        for request_id in request_ids:
            with suppress(DeviceError):  # once more, where the end of a request computes
                self._fail(request_id, error)
        for slot in self._state.slots:
            # A request whose end raised still occupies its slot.
            if slot.state in ACTIVE and not (slot.request and slot.request.id in self._requests):
                self.slot_kv.drop_aside(slot.id)
                self.clear_slot(slot.id, error)
                self.release(slot.id)
        device.settle()

    def snapshot(self) -> Snapshot:
        """Immutable state for other threads."""
        cache = self.slot_kv.prefix_cache
        counters = batch_counters(self.stats.counters, self.batch, cache.index.n_evicted)
        requests = self._last | {x.slot: x for x in self._requests.values() if x.slot is not None}
        facts = replace(batch_facts(self.facts, self.batch), kv_budget_bytes=cache.budget)
        snapshot = build_snapshot(facts, self._state, self.slots, requests, counters, self.n_ctx)
        for work in self.idle_works:
            snapshot = work.report(snapshot)
        return snapshot

    def _schedule(self) -> None:
        now = time.monotonic()
        self._state, actions = scheduler.schedule(self._state, now, self._limits, self._lookup)
        with ExitStack() as calls:
            # The state holds all of them already: each runs, also after a device error.
            for action in reversed(actions):
                calls.callback(self._execute, action)
        self._phases.awaiting = scheduler.awaiting_prefix(self._state, self._limits, self._lookup)
        self._phases.note(self._state.slots)

    def _execute(self, action: Action) -> None:
        if isinstance(action, AssignSlot):
            self.end_idle_work(action.slot)
            request_id = action.request.id
            self._guard(request_id, partial(self._assign_slot, request_id, action.slot))
        elif isinstance(action, Expire):
            late = Busy("the request took longer than the preset's queue.timeout_s")
            request_id = action.request.id
            self._end(self._requests[request_id], RequestFailed(request_id, late))
        else:
            self.end_idle_work(action.slot)
            work, _ = self._works.pop(action.id)
            work(self.slots[action.slot])

    def _assign_slot(self, request_id: str, slot: int) -> None:
        request_state = self._requests[request_id]
        request_state.assign(slot)
        self._matches.forget(request_id)
        self._prepare_slot(request_state, slot)

    def _prepare_slot(self, request_state: RequestState, slot: int) -> None:
        """Reuse known KV; what a provider brings comes first, beside other slots."""
        plan, miss = self.slot_kv.find(request_state, slot)
        if self._awaits_kv(request_state, slot, plan):
            return
        request_state.is_assigned = True
        self.slot_kv.prepare_slot(request_state.request, slot, plan)
        from_disk = request_state.n_loads and plan.source is KVSource.PARKED
        request_state.source = KVSource.DISK if from_disk else plan.source
        request_state.n_cached = len(self.slots[slot])
        request_state.miss = miss
        request_state.saved_s = self.stats.saved_s(request_state.n_cached)
        self.stats.count(n_cached_tokens=request_state.n_cached)
        event = request_state.assigned(
            self.stats.expected_s(request_state.n_cached, request_state.n_new)
        )
        for work in self.idle_works:
            event = work.observe(request_state.request, plan.position, event)
        request_state.miss = event.miss
        self._events.append(event)
        self._advance(request_state, plan.position)

    def _awaits_kv(self, request_state: RequestState, slot: int, plan: ReusePlan) -> bool:
        """Whether the slot now waits for KV that the plan lacks."""
        ready = partial(self._resume, request_state.request.id, slot)
        if not any(provider.bring(request_state, plan, ready) for provider in self.kv_providers):
            return False
        self._state = scheduler_state.start_loading(self._state, slot)
        return True

    def _resume(self, request_id: str, slot: int) -> None:
        """Resume a prompt whose KV has come, or is not coming."""
        request_state = self._requests.get(request_id)
        state = self._state.slot(slot).state
        if request_state is None or state not in COMPUTING:
            return
        if state is SlotState.LOADING:
            self._state = scheduler_state.finish_loading(self._state, slot)
        go_on = self._switch if request_state.is_assigned else self._prepare_slot
        self._guard(request_id, partial(go_on, request_state, slot))

    def _end_prefill(self, request_state: RequestState) -> None:
        for provider in self.kv_providers:
            provider.stop(request_state.request.id)
        self.batch.inputs.release(request_state.request.id)

    def _switch(self, request_state: RequestState, slot: int) -> None:
        """Continue from other KV where it is a block ahead."""
        plan, _ = self.slot_kv.find(request_state, slot)
        n_gained = plan.position - len(self.slots[slot])
        if n_gained < self._limits.prefill.block or self._awaits_kv(request_state, slot, plan):
            return
        self.slot_kv.prepare_slot(request_state.request, slot, plan)
        request_state.n_cached += n_gained
        self.stats.count(n_cached_tokens=n_gained)
        self._advance(request_state, plan.position)

    def _prefill(self, chunk: PrefillChunk) -> None:
        """Compute a chunk, and those beside it, in one pass."""
        began = time.perf_counter()
        prepared: list[PreparedChunk] = []
        for part in (chunk, *chunk.beside):
            request = self._state.slot(part.slot).request
            assert request is not None
            self._guard(request.id, partial(self._prepare_chunk, part, request, prepared))
        note = self._note_progress
        try:
            compute_chunks(self.batch, prepared)
            self.stats.prefilled([own.span for own in prepared], time.perf_counter() - began)
        except Exception as error:
            limits = without_forced(self._limits, error)
            if limits is None:
                self._break_slots(chunk.slots, error)
                return
            self._limits = limits
            note = self._begin_again
        for own in prepared:
            self._guard(own.request.id, partial(note, own))

    def _prepare_chunk(
        self, chunk: PrefillChunk, request: Request, prepared: list[PreparedChunk]
    ) -> None:
        context = self.slots[chunk.slot]
        self.slot_kv.admit_growth(context, self.slot_kv.need(request), self.idle_slots)
        policy = self._limits.prefill
        free_s = stall_left(self.stats.speed, policy) if self.batch.is_busy else policy.patience_s
        prepared.append(prepare_chunk(self.batch, context, request, chunk.n_tokens, free_s))

    def _begin_again(self, chunk: PreparedChunk) -> None:
        request_state = self._requests[chunk.request.id]
        assert request_state.slot is not None
        chunk.context.clear()
        request_state.n_cached = 0
        self._advance(request_state, 0)
        self._switch(request_state, request_state.slot)

    def _note_progress(self, chunk: PreparedChunk) -> None:
        n_prompt = len(chunk.request.tokens)
        self._events.append(PrefillProgress(chunk.request.id, chunk.span.stop, n_prompt))
        self._advance(self._requests[chunk.request.id], chunk.span.stop)

    def _advance(self, request_state: RequestState, position: int) -> None:
        """Record the prefill position; the last token joins the batch."""
        assert request_state.slot is not None
        self._state = scheduler_state.advance(self._state, request_state.slot, position)
        if self._state.slot(request_state.slot).state is SlotState.RUNNING:
            request_state.state, request_state.running_at = RequestPhase.RUNNING, time.monotonic()
            self._end_prefill(request_state)
            context = self.slots[request_state.slot]
            row = row_of(self.batch, request_state.request, request_state.slot, context, self.n_ctx)
            request_state.proposal_source = row.proposal_source
            request_state.rule = self.answer_rules(request_state.request, row.sampler)
            self.stats.count(n_prompt_tokens=len(request_state.request.tokens) - len(context))
            for first in self.batch.join(row, context.logits_after(request_state.request.tokens)):
                if last := self._receive(first):
                    self._end(request_state, last)

    def _decode(self, advance: Advance, deliver: Deliver | None = None) -> None:
        """Run or collect a step; exceptions fail its rows. Raises DeviceError."""
        if not self.batch.is_busy:
            return
        self._phases.note(self._state.slots, is_decoding=True)
        began = time.perf_counter()
        try:
            sampled = advance()
        except Exception as error:
            raise_device_error(error)
            slots = [row.slot for row in self.batch.rows]
            self.batch.reset()
            self._break_slots(slots, error)
            return
        seconds = time.perf_counter() - began
        self.stats.decoded(seconds, len(sampled), self.batch.proposer.plain_share)
        ended: dict[str, RequestFinished] = {}
        for token in sampled:
            if token.request not in ended and (last := self._receive(token)):
                ended[token.request] = last
        for last in ended.values():
            self._end(self._requests[last.request], last, deliver)
        for row, reason in self.batch.take_broken():
            self._break_slots([row.slot], reason)

    def _admit_growth(self) -> None:
        """Fail rows without device memory: the GPU would fail all of them."""
        for row in tuple(self.batch.rows):
            request = self._state.slot(row.slot).request
            assert request is not None
            n_bytes = self.slot_kv.bytes_per_token * (len(row.context) + GROWTH)
            admit = partial(self.slot_kv.admit_growth, row.context, n_bytes, self.idle_slots)
            self._guard(request.id, admit)

    def _receive(self, sampled: TokenSampled) -> RequestFinished | None:
        """Emit a wanted token; the request's end if it was the last."""
        request_state = self._requests.get(sampled.request)
        if request_state is None or request_state.slot is None:
            return None
        if self._state.slot(request_state.slot).state is not SlotState.RUNNING:
            return None
        now = time.monotonic()
        reason = request_state.choose(sampled.token, now, self.n_ctx)
        self.stats.count(n_generated_tokens=1)
        self._state = scheduler_state.begin_answer(self._state, request_state.slot)
        if reason is not FinishReason.EOS:
            self._events.append(sampled)
        if reason is None:
            return None
        return request_state.finish(reason, now)

    def _end(
        self, request_state: RequestState, last: LastEvent, deliver: Deliver | None = None
    ) -> None:
        """Release the slot; its KV may wait for the step in flight."""
        now = time.monotonic()
        request_id = request_state.request.id
        slot = request_state.slot
        is_own = False
        self._requests.pop(request_id, None)
        self._end_prefill(request_state)
        self._matches.forget(request_id)
        self._state = scheduler_state.dequeue(self._state, request_id)
        if slot is not None:
            # Until its KV is read from disk, the slot holds the context of another request.
            is_loading = self._state.slot(slot).state is SlotState.LOADING
            is_own = request_state.is_assigned and not is_loading
            if is_own:
                if not request_state.request.drops_kv:
                    self._last[slot] = request_state
                request_state.ended_step = self._n_steps
                self.stats.served(request_state.work(now), now - request_state.assigned_at)
            n_tokens = self.slot_kv.n_tokens_after(slot)
            self._state = scheduler_state.release_slot(self._state, slot, n_tokens, now)
        request_state.state = self.stats.ended(last)
        self._events.append(last)
        if deliver is not None:
            self.flush(deliver)
        if is_own and slot is not None:
            self._keep(slot)

    def _keep(self, slot: int) -> None:
        """Store a finished request's context; an error is only logged. Raises DeviceError."""
        try:
            self.batch.leave(slot)
            self.slot_kv.end_request(slot)
        except Exception as error:
            raise_device_error(error)
            log.exception("the context of slot %d could not be stored after a request", slot)
            self.clear_slot(slot, describe_error(error, "keeping this slot"))
            self.release(slot)

    def _guard(self, request_id: str, work: Callable[[], None]) -> None:
        """Run `work`; an exception fails this request alone. Raises DeviceError."""
        try:
            work()
        except Exception as error:  # any error concerns this request only
            self._break(request_id, error)

    def _break_slots(self, slots: Iterable[int], error: Exception) -> None:
        for request in [self._state.slot(slot).request for slot in slots]:
            if request is not None:
                self._break(request.id, error)

    def _break(self, request_id: str, error: Exception) -> None:
        """Fail a request, and log an internal error. Raises DeviceError."""
        raise_device_error(error)
        if not isinstance(error, StackError) or isinstance(error, Broken):
            request = self._requests[request_id].request.caller.request_id or request_id
            log.error("request %s failed in the engine: %s", request, error, exc_info=error)
        self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        request_state = self._requests[request_id]
        plain = describe_error(error, "this request")
        if request_state.slot is not None and request_state.is_assigned:
            self.clear_slot(request_state.slot, plain)
        self._end(request_state, RequestFailed(request_id, plain))

    def clear_slot(self, slot: int, error: StackError) -> None:
        """Empty a broken context, and notify slot actions that need it."""
        self.slots[slot].clear()
        for pending in self._state.actions:
            _, on_lost = self._works[pending.id]
            if pending.slot == slot and on_lost is not None:
                del self._works[pending.id]
                self._state = scheduler_state.drop_action(self._state, pending)
                on_lost(error)

    def _refuse(self, request: Request, error: StackError) -> None:
        self.stats.count(n_refused=1)
        self._events.append(RequestFailed(request.id, error))
