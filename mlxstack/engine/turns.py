"""Turns: listen, decide, decode one token for every running slot, prefill a bite, deliver.

No thread and no queue here: `Turns` is driven by `engine.thread`, and by tests directly.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.core.ask import Ask
from mlxstack.core.errors import Broken, Busy, StackError, in_words
from mlxstack.core.event import (
    Chosen,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Queued,
    Seated,
    Source,
)
from mlxstack.core.snapshot import AskState, Snapshot
from mlxstack.engine import buffer_cache
from mlxstack.engine.batch import Batch, Sampled
from mlxstack.engine.holding import Holding
from mlxstack.engine.ledger import Ledger
from mlxstack.engine.live import Live, ticket_of
from mlxstack.engine.matches import Matches
from mlxstack.engine.picture import draw
from mlxstack.engine.prefill import bite, row_of
from mlxstack.engine.seating import Seating
from mlxstack.policy import desk as desks
from mlxstack.policy import waiting
from mlxstack.policy.desk import ACTIVE, SeatState, Ticket
from mlxstack.policy.scheduler import Expire, Give, Limits, Run, choose_bite, decide, is_full

log = logging.getLogger(__name__)

MOST_LOADS = 3
"""An ask goes to the disk so many times; then it does with what is in memory."""

Events = tuple[Event, ...]
Deliver = Callable[[Events], None]


class Turns(Holding):
    """All that changes while serving: desk, contexts, batch. Single owner, no locks."""

    def __init__(self, model: object, seating: Seating, n_ctx: int, limits: Limits) -> None:
        super().__init__(seating.slots)
        self._model = model
        self.n_ctx = n_ctx
        self._limits = limits
        self.seating = seating
        self.batch = Batch(model)
        self._live: dict[str, Live] = {}
        self._last: dict[int, Live] = {}
        self._matches = Matches(self.slots, self._live, limits.pace.block)
        self.ledger = Ledger()
        self._events: list[Event] = []
        self._n_turns = 0
        self.max_cached_bytes = buffer_cache.MIN_BOUND
        """Bytes of freed buffers beyond which MLX's cache is emptied at the end of a turn."""

    @property
    def has_work(self) -> bool:
        """Whether another turn would do anything."""
        return bool(self._live or self._desk.errands)

    def submit(self, ask: Ask) -> None:
        """The ask joins the queue, or is refused at once when that is full."""
        ticket = ticket_of(ask, self.seating.need(ask))
        if ticket.n_bytes > self.seating.memory.budget:
            self._refuse(ask, self.seating.too_big(ask))
            return
        if is_full(self._desk, ticket, time.monotonic(), self._limits):
            wait = waiting.retry_after(self._desk, self.ledger.seconds_per_ask)
            n = len(self._desk.waiting)
            self._refuse(ask, Busy(f"all slots are busy and {n} requests wait", wait))
            return
        self._live[ask.id] = Live(ask)
        self.ledger.count(n_asks=1)
        self._say(Queued(ask.id, len(self._desk.waiting)))
        self._desk = desks.arrive(self._desk, ticket)

    def cancel(self, ask_id: str) -> None:
        """Stop an ask in whatever state it is; its KV so far stays in the slot."""
        live = self._live.get(ask_id)
        if live is not None:
            self._end(live, Finished(ask_id, FinishReason.CANCELLED, live.work(time.monotonic())))

    def renew(self, slot: int) -> None:
        """A held slot is idle again, with a context that no ask has made."""
        self._last.pop(slot, None)
        now = time.monotonic()
        self._desk = desks.renew(self._desk, slot, len(self.slots[slot]), now)

    def name_in(self, slot: int) -> str | None:
        """Who spoke last in this slot, as the snapshot says it."""
        last = self._last.get(slot)
        return (last.ask.agent or last.ask.name) if last else None

    def turn(self, deliver: Deliver) -> None:
        """One round. Events are delivered before a bite begins, and at the end."""
        self._n_turns += 1
        self._seat_people()
        self._desk, next_bite = choose_bite(self._desk, self.ledger.speed, self._limits.pace)
        self._decode(self.batch.step)
        if next_bite is not None:
            # Nobody's token waits for the bite, and the bite is timed alone.
            self._decode(self.batch.settle)
            self.flush(deliver)
            self._prefill(next_bite.slot, next_bite.n_tokens)
        if mx.get_cache_memory() > self.max_cached_bytes:
            self.release_buffers()
        self.flush(deliver)
        self.seating.tidy(self._n_turns, desks.idle_slots(self._desk))

    def release_buffers(self) -> None:
        """Empty MLX's buffer cache, once no step is in flight; what it chose is kept."""
        self._decode(self.batch.settle)
        buffer_cache.release()

    def flush(self, deliver: Deliver) -> None:
        """Hand over the events so far."""
        if self._events:
            events, self._events = tuple(self._events), []
            deliver(events)

    def end_all(self, error: StackError) -> None:
        """Every ask ends with this error; what it has computed stays in its slot."""
        for live in list(self._live.values()):
            self._end(live, Failed(live.ask.id, error))

    def fail_all(self, error: StackError) -> None:
        """Every ask ends with this error and its slot is emptied; no other slot has changed."""
        self.batch.reset()
        for ask_id in list(self._live):
            self._fail(ask_id, error)
        for seat in self._desk.seats:
            # An ask whose end broke has left its seat behind.
            if seat.state in ACTIVE:
                self._clear(seat.id, error)
                self.release(seat.id)
        buffer_cache.release()

    def snapshot(self) -> Snapshot:
        """What everybody else may know."""
        counters = replace(
            self.ledger.counters,
            n_decode_calls=self.batch.n_calls,
            n_decode_rows=self.batch.n_rows,
            n_evicted=self.seating.memory.index.n_evicted,
        )
        shown = {**self._last, **{x.slot: x for x in self._live.values() if x.slot is not None}}
        return draw(self._desk, self.slots, shown, counters, self.n_ctx, self._n_turns)

    def _seat_people(self) -> None:
        now = time.monotonic()
        shared, promised = self._matches.shared, self._matches.promised
        self._desk, actions = decide(self._desk, now, self._limits, shared, promised)
        for action in actions:
            if isinstance(action, Give):
                self._guard(action.ticket.ask, partial(self._seat, action.ticket, action.slot))
            elif isinstance(action, Expire):
                late = Busy("the request took longer than the preset's queue.timeout_s")
                self._end(self._live[action.ticket.ask], Failed(action.ticket.ask, late))
            elif isinstance(action, Run):
                self._run(action.errand)

    def _seat(self, ticket: Ticket, slot: int) -> None:
        live = self._live[ticket.ask]
        live.slot, live.seated_at = slot, time.monotonic()
        live.state = AskState.PREFILLING
        self._matches.forget(ticket.ask)
        self._place(live, slot)

    def _place(self, live: Live, slot: int) -> None:
        """Reuse what there is; what lies on disk is read first, while others go on."""
        may_read = live.n_loads < MOST_LOADS
        plan, miss = self.seating.plan(live.ask, slot, may_read=may_read)
        if self.seating.load(plan, partial(self._placed, live.ask.id, slot)):
            live.n_loads += 1
            self._desk = desks.load(self._desk, slot)
            return
        self.seating.occupy(live.ask, slot, plan)
        from_disk = live.n_loads and plan.source is Source.PARKED
        live.source = Source.DISK if from_disk else plan.source
        live.n_cached, live.miss = plan.position, miss
        live.saved_s = self.ledger.saved_s(plan.position)
        self.ledger.count(n_cached_tokens=plan.position)
        self._say(Seated(live.ask.id, slot, plan.position, live.source, miss))
        self._reach(live, plan.position)

    def _placed(self, ask_id: str, slot: int) -> None:
        live = self._live.get(ask_id)
        if live is not None and self._desk.seat(slot).state is SeatState.LOADING:
            self._desk = desks.loaded(self._desk, slot)
            self._guard(ask_id, partial(self._place, live, slot))

    def _prefill(self, slot: int, n_tokens: int) -> None:
        seat = self._desk.seat(slot)
        assert seat.ticket is not None
        live = self._live[seat.ticket.ask]
        self._guard(live.ask.id, partial(self._bite, live, slot, n_tokens))

    def _bite(self, live: Live, slot: int, n_tokens: int) -> None:
        context = self.slots[slot]
        start = len(context)
        took = bite(self._model, context, live.ask, n_tokens)
        live.prefill_s += took
        self.ledger.prefilled(start, len(context) - start, took)
        self._say(Progress(live.ask.id, len(context), len(live.ask.tokens)))
        self._reach(live, len(context))

    def _reach(self, live: Live, position: int) -> None:
        """Prefill stands at `position`; with one token left the slot joins the batch."""
        assert live.slot is not None
        self._desk = desks.advance(self._desk, live.slot, position)
        if self._desk.seat(live.slot).state is SeatState.RUNNING:
            live.state, live.running_at = AskState.RUNNING, time.monotonic()
            self.batch.join(row_of(live.ask, live.slot, self.slots[live.slot]))
            self.ledger.count(n_prompt_tokens=1)

    def _decode(self, advance: Callable[[], list[Sampled]]) -> None:
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

    def _receive(self, one: Sampled) -> None:
        seat = self._desk.seat(one.row.slot)
        live = self._live.get(seat.ticket.ask) if seat.ticket else None
        if live is None or seat.state is not SeatState.RUNNING:
            return
        now = time.monotonic()
        reason = live.choose(one.token, now, self.n_ctx)
        self.ledger.count(n_generated_tokens=1)
        if reason is not FinishReason.EOS:
            self._say(Chosen(live.ask.id, one.token, one.logprob, one.top))
        if reason is not None:
            self._end(live, Finished(live.ask.id, reason, live.work(now)))

    def _end(self, live: Live, last: Finished | Failed) -> None:
        now = time.monotonic()
        self._live.pop(live.ask.id, None)
        self._matches.forget(live.ask.id)
        self._desk = desks.leave_queue(self._desk, live.ask.id)
        if live.slot is not None:
            # The context is somebody else's while this ask waits for the disk.
            if self._desk.seat(live.slot).state is not SeatState.LOADING:
                self.batch.leave(live.slot)
                self._keep(live.slot)
                self._last[live.slot] = live
                self.ledger.served(live.work(now), now - live.seated_at)
            self._desk = desks.release(self._desk, live.slot, len(self.slots[live.slot]), now)
        live.state = self.ledger.ended(last)
        self._say(last)

    def _keep(self, slot: int) -> None:
        """What an ask has left in its slot is kept; if that breaks, the answer is none the less."""
        try:
            self.seating.end_turn(slot)
        except Exception as error:
            log.exception("what an answer left in slot %d could not be kept", slot)
            self._clear(slot, in_words(error, "keeping this slot"))

    def _guard(self, ask_id: str, work: Callable[[], None]) -> None:
        """A request that raises fails alone, with its slot reset."""
        try:
            work()
        except Exception as error:  # whatever it was, it concerns this ask only
            self._log(ask_id, error)
            self._fail(ask_id, error)

    def _break(self, slots: list[int], error: Exception) -> None:
        for slot in slots:
            ticket = self._desk.seat(slot).ticket
            if ticket is not None:
                self._log(ticket.ask, error)
                self._fail(ticket.ask, error)

    def _log(self, ask_id: str, error: Exception) -> None:
        """Log an error that the client cannot act on, with its traceback and the request id."""
        if not isinstance(error, StackError) or isinstance(error, Broken):
            request = self._live[ask_id].ask.request or ask_id
            log.error("request %s failed in the engine: %s", request, error, exc_info=error)

    def _fail(self, ask_id: str, error: Exception) -> None:
        live, plain = self._live[ask_id], in_words(error, "this request")
        if live.slot is not None:
            self._clear(live.slot, plain)
        self._end(live, Failed(ask_id, plain))

    def _refuse(self, ask: Ask, error: StackError) -> None:
        self.ledger.count(n_refused=1)
        self._say(Failed(ask.id, error))

    def _say(self, event: Event) -> None:
        self._events.append(event)
