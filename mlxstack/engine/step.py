"""Turns: listen, decide, decode one token for every running slot, prefill a bite, deliver.

No thread and no queue here: `Turns` is driven by `engine.thread`, and by tests directly.
"""

import logging
import time
from collections.abc import Callable
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
    RequestQueued,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.engine_snapshot import RequestPhase, Snapshot
from mlxstack.core.errors import Broken, Busy, StackError, describe_error
from mlxstack.core.request import Request
from mlxstack.engine import buffer_cache
from mlxstack.engine.decode.batch import Batch, RowToken
from mlxstack.engine.decode.prefill import prefill_chunk, row_of
from mlxstack.engine.kv.overlap_cache import PrefixOverlapCache
from mlxstack.engine.kv.slot_preparation import SlotKVManager
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.engine.request_state import RequestState, queued_request_of
from mlxstack.engine.slot_reservations import SlotReservations
from mlxstack.engine.snapshot import build_snapshot
from mlxstack.engine.stats import EngineStats
from mlxstack.policy import request_queue
from mlxstack.policy import scheduler_state as desks
from mlxstack.policy.scheduler import (
    AssignSlot,
    Expire,
    RunSlotAction,
    SchedulerLimits,
    is_full,
    next_prefill_chunk,
    schedule,
)
from mlxstack.policy.scheduler_state import ACTIVE, QueuedRequest, SlotState

log = logging.getLogger(__name__)

MOST_LOADS = 3
"""An ask goes to the disk so many times; then it does with what is in memory."""

Events = tuple[Event, ...]
Deliver = Callable[[Events], None]


class EngineLoop(SlotReservations):
    """All that changes while serving: desk, contexts, batch. Single owner, no locks."""

    def __init__(
        self, runner: ModelRunner, slot_kv: SlotKVManager, n_ctx: int, limits: SchedulerLimits
    ) -> None:
        super().__init__(slot_kv.slots)
        self._runner = runner
        self.n_ctx = n_ctx
        self._limits = limits
        self.slot_kv = slot_kv
        self.batch = Batch(runner)
        self.is_drafting = False
        self._live: dict[str, RequestState] = {}
        self._last: dict[int, RequestState] = {}
        self._matches = PrefixOverlapCache(self.slots, self._live, limits.pace.block)
        self.ledger = EngineStats()
        self._events: list[Event] = []
        self._n_steps = 0
        self.max_cached_bytes = buffer_cache.MIN_BOUND
        """Bytes of freed buffers beyond which MLX's cache is emptied at the end of a turn."""

    @property
    def has_work(self) -> bool:
        """Whether another turn would do anything."""
        return bool(self._live or self._state.actions)

    def submit(self, request: Request) -> None:
        """The ask joins the queue, or is refused at once when that is full."""
        ticket = queued_request_of(request, self.slot_kv.need(request))
        if ticket.n_bytes > self.slot_kv.memory.budget:
            self._refuse(request, self.slot_kv.too_big(request))
            return
        if is_full(self._state, ticket, time.monotonic(), self._limits):
            wait = request_queue.retry_after(self._state, self.ledger.seconds_per_request)
            n = len(self._state.waiting)
            self._refuse(request, Busy(f"all slots are busy and {n} requests wait", wait))
            return
        self._live[request.id] = RequestState(request)
        self.ledger.count(n_asks=1)
        self._emit(RequestQueued(request.id, len(self._state.waiting)))
        self._state = desks.enqueue(self._state, ticket)

    def cancel(self, request_id: str) -> None:
        """Stop an ask in whatever state it is; its KV so far stays in the slot."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(
                live,
                RequestFinished(request_id, FinishReason.CANCELLED, live.work(time.monotonic())),
            )

    def renew(self, slot: int) -> None:
        """A held slot is idle again, with a context that no ask has made."""
        self._last.pop(slot, None)
        now = time.monotonic()
        self._state = desks.reset_slot(self._state, slot, len(self.slots[slot]), now)

    def agent_in(self, slot: int) -> str | None:
        """Who spoke last in this slot, as the snapshot says it."""
        last = self._last.get(slot)
        return (last.request.agent or last.request.display_name) if last else None

    def step(self, deliver: Deliver) -> None:
        """One round. Events are delivered before a bite begins, and at the end."""
        self._n_steps += 1
        self._schedule()
        self._state, next_bite = next_prefill_chunk(
            self._state, self.ledger.speed, self._limits.pace
        )
        self._decode(self.batch.step)
        if next_bite is not None:
            # Nobody's token waits for the bite, and the bite is timed alone.
            self._decode(self.batch.sync)
            self.flush(deliver)
            self._prefill(next_bite.slot, next_bite.n_tokens)
        if mx.get_cache_memory() > self.max_cached_bytes:
            self.release_buffers()
        self.flush(deliver)
        self.slot_kv.maintain(self._n_steps, desks.idle_slots(self._state))

    def release_buffers(self) -> None:
        """Empty MLX's buffer cache, once no step is in flight; what it chose is kept."""
        self._decode(self.batch.sync)
        buffer_cache.release()

    def flush(self, deliver: Deliver) -> None:
        """Hand over the events so far."""
        if self._events:
            events, self._events = tuple(self._events), []
            deliver(events)

    def end_all(self, error: StackError) -> None:
        """Every ask ends with this error; what it has computed stays in its slot."""
        for live in list(self._live.values()):
            self._end(live, RequestFailed(live.request.id, error))

    def fail_all(self, error: StackError) -> None:
        """Every ask ends with this error and its slot is emptied; no other slot has changed."""
        self.batch.reset()
        for request_id in list(self._live):
            self._fail(request_id, error)
        for slot in self._state.slots:
            # An ask whose end broke has left its seat behind.
            if slot.state in ACTIVE:
                self._clear(slot.id, error)
                self.release(slot.id)
        buffer_cache.release()

    def snapshot(self) -> Snapshot:
        """What everybody else may know."""
        counters = replace(
            self.ledger.counters,
            n_decode_calls=self.batch.n_calls,
            n_decode_rows=self.batch.n_rows,
            n_drafts=self.batch.n_drafts,
            n_drafted_tokens=self.batch.n_drafted,
            n_accepted_tokens=self.batch.n_accepted,
            n_evicted=self.slot_kv.memory.index.n_evicted,
        )
        shown = {**self._last, **{x.slot: x for x in self._live.values() if x.slot is not None}}
        return build_snapshot(self._state, self.slots, shown, counters, self.n_ctx, self._n_steps)

    def _schedule(self) -> None:
        now = time.monotonic()
        shared, promised = self._matches.shared, self._matches.promised
        self._state, actions = schedule(self._state, now, self._limits, shared, promised)
        for action in actions:
            if isinstance(action, AssignSlot):
                self._guard(
                    action.queued.request, partial(self._assign_slot, action.queued, action.slot)
                )
            elif isinstance(action, Expire):
                late = Busy("the request took longer than the preset's queue.timeout_s")
                self._end(
                    self._live[action.queued.request], RequestFailed(action.queued.request, late)
                )
            elif isinstance(action, RunSlotAction):
                self._run(action.action)

    def _assign_slot(self, ticket: QueuedRequest, slot: int) -> None:
        live = self._live[ticket.request]
        live.slot, live.seated_at = slot, time.monotonic()
        live.state = RequestPhase.PREFILLING
        self._matches.forget(ticket.request)
        self._prepare_slot(live, slot)

    def _prepare_slot(self, live: RequestState, slot: int) -> None:
        """Reuse what there is; what lies on disk is read first, while others go on."""
        may_read = live.n_loads < MOST_LOADS
        plan, miss = self.slot_kv.plan(live.request, slot, may_read=may_read)
        if self.slot_kv.load(plan, partial(self._slot_prepared, live.request.id, slot)):
            live.n_loads += 1
            self._state = desks.start_loading(self._state, slot)
            return
        self.slot_kv.prepare_slot(live.request, slot, plan)
        from_disk = live.n_loads and plan.source is KVSource.PARKED
        live.source = KVSource.DISK if from_disk else plan.source
        live.n_cached, live.miss = plan.position, miss
        live.saved_s = self.ledger.saved_s(plan.position)
        self.ledger.count(n_cached_tokens=plan.position)
        self._emit(SlotAssigned(live.request.id, slot, plan.position, live.source, miss))
        self._advance(live, plan.position)

    def _slot_prepared(self, request_id: str, slot: int) -> None:
        live = self._live.get(request_id)
        if live is not None and self._state.slot(slot).state is SlotState.LOADING:
            self._state = desks.finish_loading(self._state, slot)
            self._guard(request_id, partial(self._prepare_slot, live, slot))

    def _prefill(self, slot: int, n_tokens: int) -> None:
        slot_state = self._state.slot(slot)
        assert slot_state.queued is not None
        live = self._live[slot_state.queued.request]
        self._guard(live.request.id, partial(self._prefill_chunk, live, slot, n_tokens))

    def _prefill_chunk(self, live: RequestState, slot: int, n_tokens: int) -> None:
        context = self.slots[slot]
        start = len(context)
        took = prefill_chunk(self._runner, context, live.request, n_tokens)
        live.prefill_s += took
        self.ledger.prefilled(start, len(context) - start, took)
        self._emit(PrefillProgress(live.request.id, len(context), len(live.request.tokens)))
        self._advance(live, len(context))

    def _advance(self, live: RequestState, position: int) -> None:
        """Prefill stands at `position`; with one token left the slot joins the batch."""
        assert live.slot is not None
        self._state = desks.advance(self._state, live.slot, position)
        if self._state.slot(live.slot).state is SlotState.RUNNING:
            live.state, live.running_at = RequestPhase.RUNNING, time.monotonic()
            context = self.slots[live.slot]
            row = row_of(live.request, live.slot, context, self.n_ctx, is_drafting=self.is_drafting)
            live.drafter = row.drafter
            self.batch.join(row)
            self.ledger.count(n_prompt_tokens=1)

    def _decode(self, advance: Callable[[], list[RowToken]]) -> None:
        """Take or finish a step; one that breaks takes its rows with it, not the service."""
        if not self.batch.is_busy:
            return
        began = time.perf_counter()
        try:
            sampled = advance()
        except Exception as error:
            self._break([row.slot for row in self.batch.rows], error)
            self.batch.reset()
            return
        self.ledger.decoded(time.perf_counter() - began, len(sampled))
        for one in sampled:
            self._receive(one)
        for row, reason in self.batch.take_broken():
            self._break([row.slot], reason)

    def _receive(self, one: RowToken) -> None:
        slot = self._state.slot(one.row.slot)
        live = self._live.get(slot.queued.request) if slot.queued else None
        if live is None or slot.state is not SlotState.RUNNING:
            return
        now = time.monotonic()
        reason = live.choose(one.token, now, self.n_ctx)
        self.ledger.count(n_generated_tokens=1)
        if reason is not FinishReason.EOS:
            self._emit(TokenSampled(live.request.id, one.token, one.logprob, one.top))
        if reason is not None:
            self._end(live, RequestFinished(live.request.id, reason, live.work(now)))

    def _end(self, live: RequestState, last: RequestFinished | RequestFailed) -> None:
        now = time.monotonic()
        self._live.pop(live.request.id, None)
        self._matches.forget(live.request.id)
        self._state = desks.dequeue(self._state, live.request.id)
        if live.slot is not None:
            # The context is somebody else's while this ask waits for the disk.
            if self._state.slot(live.slot).state is not SlotState.LOADING:
                self.batch.leave(live.slot)
                self._keep(live.slot)
                self._last[live.slot] = live
                self.ledger.served(live.work(now), now - live.seated_at)
            self._state = desks.release_slot(
                self._state, live.slot, len(self.slots[live.slot]), now
            )
        live.state = self.ledger.ended(last)
        self._emit(last)

    def _keep(self, slot: int) -> None:
        """What an ask has left in its slot is kept; if that breaks, the answer is none the less."""
        try:
            self.slot_kv.end_request(slot)
        except Exception as error:
            log.exception("what an answer left in slot %d could not be kept", slot)
            self._clear(slot, describe_error(error, "keeping this slot"))

    def _guard(self, request_id: str, work: Callable[[], None]) -> None:
        """A request that raises fails alone, with its slot reset."""
        try:
            work()
        except Exception as error:  # whatever it was, it concerns this ask only
            self._log(request_id, error)
            self._fail(request_id, error)

    def _break(self, slots: list[int], error: Exception) -> None:
        for slot in slots:
            ticket = self._state.slot(slot).queued
            if ticket is not None:
                self._log(ticket.request, error)
                self._fail(ticket.request, error)

    def _log(self, request_id: str, error: Exception) -> None:
        """Log an error that the client cannot act on, with its traceback and the request id."""
        if not isinstance(error, StackError) or isinstance(error, Broken):
            request = self._live[request_id].request.request_id or request_id
            log.error("request %s failed in the engine: %s", request, error, exc_info=error)

    def _fail(self, request_id: str, error: Exception) -> None:
        live, plain = self._live[request_id], describe_error(error, "this request")
        if live.slot is not None:
            self._clear(live.slot, plain)
        self._end(live, RequestFailed(request_id, plain))

    def _refuse(self, request: Request, error: StackError) -> None:
        self.ledger.count(n_refused=1)
        self._emit(RequestFailed(request.id, error))

    def _emit(self, event: Event) -> None:
        self._events.append(event)
