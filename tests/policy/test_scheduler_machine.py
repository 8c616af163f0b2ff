"""Random histories of the scheduler: arrivals, cancels, pins, parks, disk, memory pressure."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace

from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Priority, Request
from mlxstack.features.early_turns import policy as early_turns
from mlxstack.features.early_turns.policy import REST_STEPS, EarlyQueue, EarlyTurn
from mlxstack.policy.scheduling import scheduler_state as desks
from mlxstack.policy.scheduling.chunked_prefill import (
    FINEST,
    HEADROOM,
    ThroughputModel,
    observe_prefill,
    prefill_s,
)
from mlxstack.policy.scheduling.scheduler import (
    Action,
    AssignSlot,
    Expire,
    Lookup,
    SchedulerLimits,
    effective_priority,
    is_full,
    next_prefill_chunk,
    schedule,
)
from mlxstack.policy.scheduling.scheduler_state import (
    ACTIVE,
    SchedulerState,
    Slot,
    SlotAction,
    SlotState,
)
from tests.policy.scheduler_states import heads_for, is_agents_turn, open_seats, put

AGING = 0.1
TPS = 1000.0
HEAD = 600
"""Prompts of one team share so many first tokens."""


class Histories(RuleBasedStateMachine):
    """A fake engine: it does what the scheduler says, and looks whether that was right."""

    asks = Bundle("asks")

    @initialize(
        n_slots=st.integers(1, 4), max_active=st.integers(1, 4), max_waiting=st.integers(0, 6)
    )
    def open(self, n_slots: int, max_active: int, max_waiting: int) -> None:
        self.now = 100.0
        self.desk = desks.initial_state(n_slots)
        self.limits = SchedulerLimits(
            max_active=max_active, max_waiting=max_waiting, aging_per_s=AGING
        )
        self.lookup = Lookup(self.match, self.promise)
        self.speed = ThroughputModel()
        self.shares: dict[str, float] = {}
        self.teams: dict[str, str | None] = {}
        self.on_disk: set[str] = set()
        self.admitted: set[str] = set()
        self.ended: dict[str, str] = {}
        self.requested: set[str] = set()
        self.done: set[str] = set()
        self.n_ids = 0
        self.early = EarlyQueue()

    # What happens

    @rule(
        target=asks,
        priority=st.sampled_from(Priority),
        agent=st.none() | st.sampled_from("ab"),
        pin=st.none() | st.integers(0, 3),
        n_prompt=st.sampled_from((1, 2, 50, 700, 9000)),
        patience=st.none() | st.floats(0.5, 60),
        late=st.sampled_from((0.0, 0.0, 0.7)),
        share=st.sampled_from((0.0, 0.6, 1.0)),
        team=st.none() | st.just("blue"),
        is_on_disk=st.booleans(),
    )
    def somebody_asks(
        self,
        *,
        priority: Priority,
        agent: str | None,
        pin: int | None,
        n_prompt: int,
        patience: float | None,
        late: float,
        share: float,
        team: str | None,
        is_on_disk: bool,
    ) -> str:
        """`late` is how long the ask took from the door to the queue."""
        ask = self.new_id()
        arrived = self.now - late
        ticket = Request(
            ask,
            PromptTokens((0,) * n_prompt),
            max_tokens=1,
            slot=None if pin is None else pin % len(self.desk.slots),
            caller=Caller(agent=agent, priority=priority),
            arrived=arrived,
            deadline=None if patience is None else arrived + patience,
        )
        if is_full(self.desk, ticket, self.now, self.limits, self.lookup):
            assert len(self.desk.waiting) >= self.limits.max_waiting
            return ask
        self.admitted.add(ask)
        self.shares[ask] = share
        self.teams[ask] = team
        self.on_disk |= {ask} if is_on_disk else set()
        self.desk = desks.enqueue(self.desk, ticket)
        return ask

    @rule(ask=asks)
    def somebody_leaves(self, ask: str) -> None:
        if ask in self.admitted and ask not in self.ended:
            self.end(ask, "cancelled")

    @precondition(lambda self: any(s.state is SlotState.IDLE for s in self.desk.slots))
    @rule(n_prompt=st.sampled_from((1, 40, 3000)), n_rested=st.sampled_from((0, REST_STEPS)))
    def a_next_turn_is_expected(self, n_prompt: int, n_rested: int) -> None:
        slot = next(s.id for s in self.desk.slots if s.state is SlotState.IDLE)
        self.early = early_turns.begin(self.early, EarlyTurn(slot, n_prompt))
        self.early = replace(self.early, n_rested=n_rested)

    @rule(slot=st.integers(0, 3))
    def an_errand_is_requested(self, slot: int) -> None:
        errand = SlotAction(self.new_id(), slot % len(self.desk.slots), self.now)
        self.requested.add(errand.id)
        self.desk = desks.enqueue_action(self.desk, errand)

    @precondition(lambda self: any(s.state is SlotState.HELD for s in self.desk.slots))
    @rule(n_tokens=st.sampled_from((0, 500)))
    def an_errand_ends(self, n_tokens: int) -> None:
        """Saved, parked (nothing is left) or restored."""
        slot = next(s.id for s in self.desk.slots if s.state is SlotState.HELD)
        self.desk = desks.release_slot(self.desk, slot, n_tokens, self.now)

    @precondition(lambda self: any(s.state is SlotState.LOADING for s in self.desk.slots))
    @rule()
    def the_disk_answers(self) -> None:
        slot = next(s.id for s in self.desk.slots if s.state is SlotState.LOADING)
        self.desk = desks.advance(desks.finish_loading(self.desk, slot), slot, 0)

    @rule(seconds=st.floats(0.01, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(max_active=st.integers(1, 4))
    def memory_gets_tight_or_free(self, max_active: int) -> None:
        self.limits = replace(self.limits, max_active=max_active)

    @precondition(lambda self: any(s.state is SlotState.RUNNING for s in self.desk.slots))
    @rule(which=st.integers(0, 3))
    def an_answer_ends(self, which: int) -> None:
        running = [s for s in self.desk.slots if s.state is SlotState.RUNNING]
        ticket = running[which % len(running)].request
        assert ticket is not None
        self.end(ticket.id, "served")

    @rule()
    def a_turn(self) -> None:
        before = self.desk
        self.desk, actions = schedule(before, self.now, self.limits, self.lookup)
        self.check_order(before, actions)
        self.check_nothing_is_left_undone()
        for action in actions:
            match action:
                case Expire(ticket):
                    assert ticket.deadline is not None
                    assert ticket.deadline <= self.now
                    self.end(ticket.id, "expired")
                case SlotAction() as errand:
                    self.early = early_turns.end(self.early, errand.slot)
                    self.done.add(errand.id)
                case AssignSlot(ticket, slot):
                    self.early = early_turns.end(self.early, slot)
                    self.take(ticket, before.slot(slot))
        self.bite()
        self.early_bite()

    # What must be true

    @invariant()
    def early_turns_are_in_idle_slots(self) -> None:
        slots = [turn.slot for turn in self.early.turns]
        assert len(slots) == len(set(slots))
        assert all(self.desk.slot(slot).state is SlotState.IDLE for slot in slots)

    @invariant()
    def everyone_is_at_one_place(self) -> None:
        waiting = [t.id for t in self.desk.waiting]
        seated = [s.request.id for s in self.desk.slots if s.request]
        places = [*waiting, *seated, *self.ended]
        assert len(places) == len(set(places))
        assert set(places) == self.admitted
        assert [s.id for s in self.desk.slots] == list(range(len(self.desk.slots)))
        for seat in self.desk.slots:
            assert (seat.request is not None) == (seat.state in ACTIVE)

    @invariant()
    def agents_ask_one_after_another(self) -> None:
        agents = [s.request.agent for s in self.desk.slots if s.request and s.request.agent]
        assert len(agents) == len(set(agents))

    def check_order(self, before: SchedulerState, actions: list[Action]) -> None:
        """Each step of the decision was allowed, and nobody passed one who could have gone."""
        desk = before
        for action in actions:
            match action:
                case Expire(ticket):
                    desk = desks.dequeue(desk, ticket.id)
                case SlotAction() as errand:
                    assert desk.slot(errand.slot).state is SlotState.IDLE
                    rest = tuple(e for e in desk.actions if e.id != errand.id)
                    held = replace(desk.slot(errand.slot), state=SlotState.HELD)
                    desk = put(replace(desk, actions=rest), held)
                case AssignSlot(ticket, slot):
                    assert desk.n_active < self.limits.max_active
                    assert slot in open_seats(desk, ticket)
                    assert self.can_go(desk, ticket)
                    for other in desk.waiting:
                        if self.can_go(desk, other):
                            assert self.rank(ticket) <= self.rank(other)
                    taken = replace(
                        desk.slot(slot), state=SlotState.PREFILLING, request=ticket, n_passed=0
                    )
                    desk = put(desks.dequeue(desk, ticket.id), taken)

    def check_nothing_is_left_undone(self) -> None:
        """Work conserving; errands run; deadlines hold; deciding again changes nothing."""
        desk = self.desk
        assert all(t.deadline is None or t.deadline > self.now for t in desk.waiting)
        if desk.n_active < self.limits.max_active:
            for ticket in desk.waiting:
                assert not self.can_go(desk, ticket)
        for errand in desk.actions:
            if desk.slot(errand.slot).state is SlotState.IDLE:
                pinned = [t for t in desk.waiting if t.slot == errand.slot]
                assert any(t.arrived < errand.arrived for t in pinned)
        again, actions = schedule(desk, self.now, self.limits, self.lookup)
        assert again == desk
        assert all(isinstance(a, Expire) for a in actions)

    def teardown(self) -> None:
        """Nobody starves: with nothing new, everyone admitted is served and every errand done."""
        if not hasattr(self, "desk"):
            return
        for _ in range(60 * (1 + len(self.admitted) + len(self.requested))):
            if not (self.desk.waiting or self.desk.actions or self.desk.n_active):
                break
            self.a_turn()
            for seat in self.desk.slots:
                if seat.state is SlotState.RUNNING and seat.request:
                    self.end(seat.request.id, "served")
                elif seat.state is SlotState.HELD:
                    self.desk = desks.release_slot(self.desk, seat.id, seat.n_tokens, self.now)
                elif seat.state is SlotState.LOADING:
                    self.the_disk_answers()
        assert set(self.ended) == self.admitted
        assert self.done == self.requested
        for seat in self.desk.slots:
            if seat.state is SlotState.HELD:
                self.desk = desks.release_slot(self.desk, seat.id, seat.n_tokens, self.now)
        for _ in range(1 + 200 * len(self.early.turns)):
            self.early_bite()
        assert not self.early.turns, "early turns end when there is nothing else"

    # How the fake engine does it

    def new_id(self) -> str:
        self.n_ids += 1
        return f"{self.n_ids:03}"

    def rank(self, ticket: Request) -> tuple[float, float]:
        return effective_priority(ticket, self.now, AGING), ticket.arrived

    def match(self, ask: str, slot: int) -> int:
        return self.n_shared(ask, self.desk.slot(slot))

    def promise(self, ask: str, other: str) -> int:
        return HEAD if self.teams[ask] and self.teams[ask] == self.teams[other] else 0

    def can_go(self, desk: SchedulerState, ticket: Request) -> bool:
        """A seat, the agent's turn, and nobody of the team who computes the shared head."""
        may_sit = bool(open_seats(desk, ticket)) and is_agents_turn(desk, ticket)
        return may_sit and not heads_for(desk, ticket, self.lookup)

    def take(self, ticket: Request, seat: Slot) -> None:
        """Read from disk first, or go on from what the seat shares."""
        if ticket.id in self.on_disk:
            self.desk = desks.start_loading(self.desk, seat.id)
        else:
            n_shared = min(self.n_shared(ticket.id, seat), len(ticket.tokens) - 1)
            self.desk = desks.advance(self.desk, seat.id, n_shared)

    def n_shared(self, ask: str, seat: Slot) -> int:
        return int(self.shares[ask] * seat.n_tokens)

    def bite(self) -> None:
        passed = {s.id: s.n_passed for s in self.desk.slots if s.state is SlotState.PREFILLING}
        self.desk, bite = next_prefill_chunk(self.desk, self.speed, self.limits.prefill)
        assert (bite is None) == (not passed)
        if bite is None:
            return
        seat = self.desk.slot(bite.slot)
        assert 1 <= bite.n_tokens <= max(FINEST, seat.n_left)
        self.speed = observe_prefill(self.speed, seat.position, bite.n_tokens, bite.n_tokens / TPS)
        self.desk = desks.advance(self.desk, bite.slot, seat.position + bite.n_tokens)

    def early_bite(self) -> None:
        """At most one chunk a step, behind all other work and inside the stall bound."""
        before = self.desk
        n_rested = self.early.n_rested
        self.early, chunk = early_turns.next_chunk(
            self.early, before, self.speed, self.limits.prefill
        )
        if chunk is None:
            return
        assert not before.waiting
        assert not before.actions
        states = {slot.state for slot in before.slots}
        assert states <= {SlotState.IDLE, SlotState.RUNNING}
        assert SlotState.RUNNING not in states or n_rested >= REST_STEPS
        turn = chunk.early_turn
        start = chunk.early_turn.position
        if start is None:
            self.compute_early(turn, turn.n_prompt // 2, turn.n_prompt // 2)
            return
        assert 1 <= chunk.n_tokens <= turn.n_prompt - 1 - start
        policy = self.limits.prefill
        is_short = chunk.n_tokens <= max(FINEST, policy.block)
        stall_s = prefill_s(self.speed, start, chunk.n_tokens)
        assert is_short or stall_s <= HEADROOM * policy.max_stall_s + 1e-9
        self.compute_early(turn, start + chunk.n_tokens, start)

    def compute_early(self, turn: EarlyTurn, position: int, n_kept: int) -> None:
        self.desk = desks.set_context(self.desk, turn.slot, position, n_kept)
        self.early = early_turns.advance(self.early, turn, position)

    def end(self, ask: str, how: str) -> None:
        seat = next((s for s in self.desk.slots if s.request and s.request.id == ask), None)
        self.desk = desks.dequeue(self.desk, ask)
        if seat is not None:
            self.desk = desks.release_slot(self.desk, seat.id, seat.position, self.now)
        self.ended[ask] = how


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.soak
class TestManyHistories(Histories.TestCase):  # type: ignore[misc, name-defined]
    """More of the same."""

    settings = settings(max_examples=150, stateful_step_count=40)
