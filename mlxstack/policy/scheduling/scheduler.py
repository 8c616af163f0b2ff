"""Scheduler: pure function from scheduler state to a step's actions.

Admission is bounded by slots, batch size and KV bytes. The queue is ordered by priority with
aging, one request per agent. Slots are selected by pin, conversation, longest common prefix,
then least recent use; a request may wait for a prefix that another one computes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Annotated

from msgspec import Meta, Struct

from mlxstack.core.preset import NonNegativeInt, PositiveInt, Preset
from mlxstack.core.request import Priority, Request, TurnKind
from mlxstack.policy.attention_kernels import FUSED, PrefillAttention
from mlxstack.policy.pass_layout import NOT_SHARED, SharedPrompts
from mlxstack.policy.scheduling.chunked_prefill import (
    PrefillPolicy,
    ThroughputModel,
    awaited,
    chunk_size,
    is_person_first,
    next_to_prefill,
    sharing,
)
from mlxstack.policy.scheduling.scheduler_state import (
    ACTIVE,
    SchedulerState,
    Slot,
    SlotAction,
    SlotState,
    assign_slot,
    dequeue,
    enqueue,
    reserve_slot,
    skip,
)

COMPUTING = frozenset((SlotState.LOADING, SlotState.PREFILLING))

KEEP = 0.5
"""Minimum kept share of a context to overwrite it, without empty slots."""

SLACK = 32
"""Tail tokens that templates rewrite and a follow-up may lose."""


def _none(*_: object) -> int:
    return 0


class Lookup(Struct, frozen=True):
    """Lookups of requests in the engine; each returns 0 by default."""

    overlap: Callable[[str, int], int] = _none
    """Common prefix of a request (its ID) and a slot's context, in tokens."""

    shared_prefill: Callable[[str, str], int] = _none
    """Prompt tokens of a request (the first ID) that another one's prefill computes too, else 0."""

    kv_bytes: Callable[[Request], int] = _none
    """Bytes of live KV that a request is expected to need."""


def select_slot(
    state: SchedulerState, request: Request, lookup: Lookup, barred: frozenset[int]
) -> int | None:
    """Select the slot for a request, or None to wait.

    `barred` slots are excluded. A follow-up is of the same conversation and repeats the last prompt
    of its slot. Another conversation or an edited one only shares a prefix with it, and takes an
    empty slot instead of overwriting it; the engine forks the prefix from there. A request that
    drops its KV takes an empty slot, else the one that was not used for longest. Slots that other
    requests are pinned to are taken last.
    """
    idle = [s for s in state.slots if s.state is SlotState.IDLE and s.id not in barred]
    if request.slot is not None:
        if any(s.id == request.slot for s in idle):
            return request.slot
        return None
    pinned = {t.slot for t in state.waiting}
    shared = {s.id: lookup.overlap(request.id, s.id) if s.n_tokens else 0 for s in idle}
    own = [s for s in idle if _continues(s, request, shared[s.id])]
    empty = [s for s in idle if not s.n_tokens and s.id not in pinned]
    alike = [s for s in idle if s.n_tokens and shared[s.id] >= KEEP * s.n_tokens]
    if empty:
        alike = []
    if request.drops_kv:
        own = alike = []
    for slots in (own, alike):
        if slots:
            return max(slots, key=lambda s: (shared[s.id], s.last_used)).id
    if not idle:
        return None
    return min(idle, key=lambda s: (s.id in pinned, *_worth(s))).id


def should_wait_for_prefix(state: SchedulerState, request: Request, lookup: Lookup) -> bool:
    """Whether a slot computes a prefix of this prompt: wait, then fork."""
    return any(
        slot.position < lookup.shared_prefill(request.id, slot.request.id)
        for slot in state.slots
        if slot.state in COMPUTING and slot.request
    )


def awaiting_prefix(
    state: SchedulerState, limits: "SchedulerLimits", lookup: Lookup
) -> frozenset[str]:
    """Queued requests with room that wait for a prefix under computation."""
    if not (state.waiting and _has_room(state, limits)):
        return frozenset()
    return frozenset(t.id for t in state.waiting if should_wait_for_prefix(state, t, lookup))


def _continues(slot: Slot, request: Request, n_shared: int) -> bool:
    """Whether the prompt continues this slot's conversation, as far as known.

    Short user messages make the prompts of two conversations alike but for their last tokens:
    only names tell them apart. Without names, a follow-up repeats the last prompt to its end.
    """
    name = request.display_name
    if slot.name is not None and name is not None and slot.name != name:
        return False
    n_prompt = slot.n_prompt or slot.n_tokens
    is_restored = not slot.n_prompt
    is_known = is_restored or (slot.name is not None and slot.name == name)
    slack = min(SLACK, n_prompt // 4) if is_known else 0
    return n_shared > 0 and n_prompt - n_shared <= slack


def _worth(slot: Slot) -> tuple[bool, float, int]:
    return slot.n_tokens > 0, slot.last_used, slot.id


def turn_priority(priority: Priority, of_agent: Priority | None, kind: TurnKind) -> Priority:
    """Priority of a turn by key, agent and kind, the first that decides.

    `priority` is that of the key or endpoint, `of_agent` the one that was set. A turn that no
    person waits for goes one step lower than the key or endpoint says.
    """
    if of_agent is not None and priority is Priority.NORMAL:
        return of_agent
    if kind is TurnKind.PERSON:
        return priority
    return Priority(min(priority + 1, Priority.LOW))


def effective_priority(request: Request, now: float, aging_per_s: float) -> float:
    """Effective priority: base minus `aging_per_s` for each second waited; lower goes first."""
    return request.priority - aging_per_s * max(0.0, now - request.arrived)


def sort_queue(waiting: Iterable[Request], now: float, aging_per_s: float) -> list[Request]:
    """Queue in serving order now; ties go by arrival."""
    return sorted(waiting, key=lambda t: (effective_priority(t, now, aging_per_s), t.arrived))


def schedulable(state: SchedulerState, now: float, aging_per_s: float) -> Iterator[Request]:
    """Queued requests in order; one per agent, none of a busy agent.

    Requests of one agent are served strictly in order of arrival, whatever their priority.
    """
    taken = {s.request.agent for s in state.slots if s.state in ACTIVE and s.request}
    first: dict[str, str] = {}
    for request in sorted(state.waiting, key=lambda t: t.arrived):
        if request.agent is not None:
            first.setdefault(request.agent, request.id)
    for request in sort_queue(state.waiting, now, aging_per_s):
        is_turn = request.agent not in taken and first.get(request.agent or "") == request.id
        if request.agent is None or is_turn:
            yield request


def expired(state: SchedulerState, now: float) -> list[Request]:
    """Requests whose deadline has passed, queued or in a slot."""
    requests = [*state.waiting, *(s.request for s in state.slots if s.request)]
    return [t for t in requests if t.deadline is not None and now >= t.deadline]


def retry_after(state: SchedulerState, seconds_per_request: float) -> float:
    """Seconds until the queue likely moves: its length over slots."""
    ahead = len(state.waiting) + 1
    return max(1.0, ahead * seconds_per_request / max(1, len(state.slots)))


class SchedulerLimits(Struct, frozen=True):
    """Limits: `max_active` slots prefill or decode at once; `max_waiting` requests queue.

    Live KV of at most `max_bytes` is admitted; None is no bound.
    """

    max_active: PositiveInt = 8
    max_waiting: NonNegativeInt = 64
    max_bytes: PositiveInt | None = None
    aging_per_s: Annotated[float, Meta(ge=0)] = 0.1
    prefill: PrefillPolicy = PrefillPolicy()


class AssignSlot(Struct, frozen=True):
    """Assign this request to `slot`."""

    request: Request
    slot: int


class Expire(Struct, frozen=True):
    """Deadline of a request passed; the caller releases its slot."""

    request: Request


class PrefillChunk(Struct, frozen=True):
    """Compute the next `n_tokens` of the prompt in `slot`.

    `is_awaited`: computed requests wait for it, and nothing is decoded in this step. The chunks
    `beside` end other prompts in the same pass.
    """

    slot: int
    n_tokens: int
    is_awaited: bool = False
    beside: "tuple[PrefillChunk, ...]" = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots of the pass."""
        return self.slot, *(other.slot for other in self.beside)


Action = AssignSlot | Expire | SlotAction
"""A `SlotAction` runs now; its slot is reserved."""


def is_full(
    state: SchedulerState, request: Request, now: float, limits: SchedulerLimits, lookup: Lookup
) -> bool:
    """Whether admission must refuse this request because too many would wait."""
    # Slots are counted, not chosen: contexts and shared prefixes play no part.
    bytes_only = Lookup(kv_bytes=lookup.kv_bytes)
    after, _ = schedule(enqueue(state, request), now, limits, bytes_only)
    return len(after.waiting) > limits.max_waiting


def schedule(
    state: SchedulerState, now: float, limits: SchedulerLimits, lookup: Lookup
) -> tuple[SchedulerState, list[Action]]:
    """Expire and admit requests, and start slot actions; see `next_prefill_chunk` for prefill.

    Work conserving: while the batch has a free row and an idle slot without an older action, a
    request waits only for its pinned slot, its agent, a shared prefix being computed, or memory.
    Scheduling again at once changes nothing.
    """
    actions: list[Action] = []
    for late in expired(state, now):
        state = dequeue(state, late.id)
        actions.append(Expire(late))
    for pending in state.actions:
        if state.slot(pending.slot).state is SlotState.IDLE and _is_first(state, pending):
            state = reserve_slot(state, pending)
            actions.append(pending)
    requests = schedulable(state, now, limits.aging_per_s)
    while _has_room(state, limits) and (request := next(requests, None)):
        if should_wait_for_prefix(state, request, lookup):
            continue
        slot = select_slot(state, request, lookup, _barred(state, request))
        if not _fits(state, request, limits, lookup):
            # Smaller requests do not overtake, or a large prompt would starve.
            break
        if slot is not None:
            state = assign_slot(state, request, slot)
            actions.append(AssignSlot(request, slot))
    return state, actions


def next_prefill_chunk(
    state: SchedulerState,
    speed: ThroughputModel,
    policy: PrefillPolicy,
    stalled: Collection[str] = (),
) -> tuple[SchedulerState, PrefillChunk | None]:
    """Prefill chunk of this step, None without a prompt to compute.

    Prompts of `stalled` requests come after the others.
    """
    slots = [s for s in state.slots if s.state is SlotState.PREFILLING]
    if not slots:
        return state, None
    slots = [s for s in slots if s.request and s.request.id not in stalled] or slots
    first = awaited(state.slots, speed, policy)
    candidates = first or slots
    slot = next_to_prefill(candidates, policy)
    decoding = []
    if not first:
        decoding = [s for s in state.slots if s.state is SlotState.RUNNING]
    n_decoding = len(decoding)
    if slot.request is not None and slot.request.is_background:
        n_decoding = max(1, n_decoding)
    n_tokens = chunk_size(slot, n_decoding, speed, policy, is_first=is_person_first(slot, decoding))
    others = sharing(candidates, slot, n_decoding, speed, policy)
    beside = tuple(PrefillChunk(other.id, other.n_left) for other in others)
    chunk = PrefillChunk(slot.id, n_tokens, is_awaited=bool(first), beside=beside)
    return skip(state, chunk.slots), chunk


def is_quiet(state: SchedulerState) -> bool:
    """Whether nothing waits, prefills or uses a slot, but decoding."""
    is_free = all(s.state in (SlotState.IDLE, SlotState.RUNNING) for s in state.slots)
    return is_free and not (state.waiting or state.actions)


def _has_room(state: SchedulerState, limits: SchedulerLimits) -> bool:
    is_idle = any(slot.state is SlotState.IDLE for slot in state.slots)
    return is_idle and state.n_active < limits.max_active


def _fits(state: SchedulerState, request: Request, limits: SchedulerLimits, lookup: Lookup) -> bool:
    """Whether its KV fits beside active ones; alone it never waits."""
    if limits.max_bytes is None or not state.n_active:
        return True
    active = sum(lookup.kv_bytes(s.request) for s in state.slots if s.request and s.state in ACTIVE)
    return active + lookup.kv_bytes(request) <= limits.max_bytes


def _is_first(state: SchedulerState, pending: SlotAction) -> bool:
    """Whether no older pinned request or action wants the slot."""
    return all(t.slot != pending.slot or t.arrived >= pending.arrived for t in state.waiting)


def _barred(state: SchedulerState, request: Request) -> frozenset[int]:
    """Slots with an action that is older than this request."""
    return frozenset(e.slot for e in state.actions if e.arrived < request.arrived)


def limits_of(
    preset: Preset,
    budget: int | None,
    attention: PrefillAttention = FUSED,
    shared: SharedPrompts = NOT_SHARED,
) -> SchedulerLimits:
    """Scheduler limits of a preset; `budget` is bytes of KV, or none.

    Prompts share passes where requests are batched.
    """
    block = preset.prefix_cache.block_size
    prefill = PrefillPolicy(
        max_stall_s=preset.prefill.max_stall_ms / 1000,
        max_chunk_size=preset.prefill.chunk_size,
        block=block,
        score_bytes=attention.score_bytes,
        max_score_bytes=attention.max_score_bytes,
        fused_from=attention.fused_from,
        is_forced=attention.is_forced,
        max_shared=shared.max_tokens if preset.batch.enabled else 0,
        is_padded=shared.is_padded,
    )
    return SchedulerLimits(
        max_active=preset.batch.max_size if preset.batch.enabled else 1,
        max_waiting=preset.queue.max_waiting,
        max_bytes=budget,
        aging_per_s=preset.queue.aging_per_s,
        prefill=prefill,
    )
