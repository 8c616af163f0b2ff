"""Early turns: prefill of expected prompts in idle slots."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial

from msgspec.structs import replace

from mlxstack.core.engine_events import EarlyUse, SlotAssigned
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import OutOfMemory, describe_error
from mlxstack.core.request import Request
from mlxstack.engine.decode.prefill import prefill_chunk
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.idle_work import IdleWork
from mlxstack.engine.loop import EngineLoop
from mlxstack.features.early_turns import policy as early_turns
from mlxstack.features.early_turns.history import (
    EarlyHistory,
    first_history,
    may_begin,
    note_begun,
    note_used,
)
from mlxstack.features.early_turns.policy import EarlyChunk, EarlyQueue, EarlyTurn
from mlxstack.policy.kv.prefix_index import common_tokens
from mlxstack.policy.scheduling.scheduler_state import SlotState

log = logging.getLogger(__name__)

MAX_AGENTS = 256
MAX_HISTORIES = 2 * MAX_AGENTS
"""Most histories of agents and of their clients."""


class EarlyPrompt:
    """Expected prompt, prefilled from `start` to `end` of context `version`."""

    def __init__(self, request: Request, version: int) -> None:
        self.request = request
        self.version = version
        self.start = 0
        self.end = 0

    @property
    def n_begun(self) -> int:
        """Tokens that were computed early."""
        return self.end - self.start


class EarlyPrefill(IdleWork):
    """Computes early turns, and learns from their use. MLX thread only."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._queue = EarlyQueue()
        self._chunk: EarlyChunk | None = None
        self._prompts: dict[int, EarlyPrompt] = {}
        self._n_early: dict[int, int] = {}
        """Tokens of each slot's context that were computed early."""
        self._begun: OrderedDict[str, EarlyPrompt] = OrderedDict()
        """Expected prompts by agent, until the real ones come."""
        self._histories: OrderedDict[tuple[str, str], EarlyHistory] = OrderedDict()

    def begin(self, request: Request, after: str) -> None:
        """Begin an early turn after the request `after`, in its idle slot.

        Nothing happens when the slot has been used since.
        """
        assert request.slot is not None
        loop = self._loop
        slot = request.slot
        last = loop.last_request(slot)
        is_idle = loop.state.slot(slot).state is SlotState.IDLE
        if not is_idle or last is None or last.id != after:
            return
        if not len(loop.slots[slot]) or not loop.slot_kv.prefix_cache.spec.enabled:
            return
        self._queue = early_turns.begin(self._queue, EarlyTurn(slot, len(request.tokens)))
        self._prompts[slot] = EarlyPrompt(loop.prepared(request), loop.slots[slot].version)
        if self not in loop.idle_works:
            loop.idle_works.insert(0, self)

    @property
    def is_pending(self) -> bool:
        """Whether a turn can be computed, and no other work waits."""
        return early_turns.may_run(self._queue, self._loop.state)

    @property
    def slots(self) -> Collection[int]:
        """Slots with an early turn."""
        return [early_turn.slot for early_turn in self._queue.turns]

    def has_chunk(self) -> bool:
        """Whether a chunk is due. A turn of a used slot ends."""
        loop = self._loop
        speed = loop.stats.speed
        policy = loop.prefill_policy
        self._queue, self._chunk = early_turns.next_chunk(self._queue, loop.state, speed, policy)
        if self._chunk is None:
            return False
        slot = self._chunk.early_turn.slot
        if loop.slot_kv.is_storing(slot):
            return False
        if self._prompts[slot].version != loop.slots[slot].version:
            self._queue = early_turns.end(self._queue, slot)
            return False
        return True

    def run_chunk(self) -> None:
        """Prefill the chunk; exceptions end only its turn. Raises DeviceError."""
        assert self._chunk is not None
        loop = self._loop
        slot = self._chunk.early_turn.slot
        try:
            self._advance(self._chunk)
        except OutOfMemory as error:
            log.info("early prefill skipped: %s", error)
            self.end(slot)
            loop.release(slot)
        except Exception as error:  # any error concerns this early turn only
            raise_device_error(error)
            log.exception("early prefill failed")
            self.end(slot)
            loop.clear_slot(slot, describe_error(error, "an early turn"))
            loop.renew(slot)

    def end(self, slot: int | None = None) -> None:
        """End the turn of a slot, or all turns; KV stays."""
        if slot is None:
            self._queue = replace(self._queue, turns=())
        else:
            self._queue = early_turns.end(self._queue, slot)
            self._n_early.pop(slot, None)

    def observe(self, request: Request, position: int, event: SlotAssigned) -> SlotAssigned:
        """Compare a prompt with the expected one; full use is no miss."""
        use = self._settle(request, position)
        if use is None:
            return event
        if use.n_used == use.n_begun:
            # The prompt differs from the last one as it was expected to.
            event = replace(event, miss=None)
        return replace(event, early=use)

    def report(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the early tokens of each slot, computed and left."""
        if not self._n_early:
            return snapshot
        n_left = {
            early_turn.slot: early_turn.n_prompt - 1 - early_turn.position
            for early_turn in self._queue.turns
            if early_turn.position is not None
        }
        slots = tuple(
            replace(
                view, n_early=self._n_early.get(view.id, 0), n_early_left=n_left.get(view.id, 0)
            )
            for view in snapshot.slots
        )
        return replace(snapshot, slots=slots)

    def _advance(self, chunk: EarlyChunk) -> None:
        """Look a turn's prefix up, or prefill its next chunk."""
        early_turn = chunk.early_turn
        if early_turn.position is None:
            start = self._prepare(early_turn.slot)
            if start is None:
                self._queue = early_turns.end(self._queue, early_turn.slot)
                return
            position = n_kept = start
            self._n_early.setdefault(early_turn.slot, 0)
        else:
            position = self._compute(early_turn.slot, chunk.n_tokens)
            n_kept = early_turn.position
            self._n_early[early_turn.slot] += position - n_kept
        self._loop.set_context(early_turn.slot, position, n_kept)
        self._queue = early_turns.advance(self._queue, early_turn, position)

    def _prepare(self, slot: int) -> int | None:
        """Find the cached prefix; its length, None for a worthless rest."""
        prompt = self._prompts[slot]
        slot_kv = self._loop.slot_kv
        request = prompt.request
        plan, _ = slot_kv.lookup.find(request, slot_kv.slots, slot, may_read=False)
        n_left = len(request.tokens) - 1 - plan.position
        history = self._history(request)
        fits = slot_kv.need(request) <= slot_kv.prefix_cache.budget
        # A tower would run for a prompt that may never come.
        is_text = all(image.end <= plan.position for image in request.images)
        if not (fits and is_text and may_begin(history, n_left, time.monotonic())):
            return None
        slot_kv.prepare_slot(request, slot, plan, is_expected=True)
        prompt.start = plan.position
        prompt.end = plan.position
        prompt.version = slot_kv.slots[slot].version
        self._note(prompt)
        return plan.position

    def _compute(self, slot: int, n_tokens: int) -> int:
        """Prefill a chunk; the new position. Other idle slots may be parked."""
        loop = self._loop
        prompt = self._prompts[slot]
        context = loop.slots[slot]
        request = prompt.request
        start = len(context)
        idle = [idle_slot for idle_slot in loop.idle_slots if idle_slot != slot]
        loop.slot_kv.admit_growth(context, loop.slot_kv.need(request), idle)
        took = prefill_chunk(loop.batch, context, request, n_tokens)
        prompt.end = len(context)
        prompt.version = context.version
        loop.slot_kv.note_growth()
        n_begun = prompt.end - start
        loop.stats.observe_chunk(start, n_begun, took)
        loop.stats.count(n_early_tokens=n_begun, n_model_calls=1)
        self._learn(request, partial(note_begun, n_tokens=n_begun, now=time.monotonic()))
        return prompt.end

    def _settle(self, request: Request, n_cached: int) -> EarlyUse | None:
        """Use of an early turn by the next request of the agent."""
        prompt = self._begun.get(_name(request))
        if prompt is None or prompt.request.salt != request.salt or not request.use_cache:
            return None
        del self._begun[_name(request)]
        n_common = min(common_tokens(prompt.request, request), n_cached)
        use = EarlyUse(prompt.n_begun, max(0, min(n_common, prompt.end) - prompt.start))
        return self._count(request, use) if use.n_begun else None

    def _note(self, prompt: EarlyPrompt) -> None:
        """Keep the expected tokens, to compare them to the real ones."""
        name = _name(prompt.request)
        if name in self._begun:
            self._waste(name)
        self._begun[name] = prompt
        if len(self._begun) > MAX_AGENTS:
            self._waste(next(iter(self._begun)))

    def _waste(self, name: str) -> None:
        """Count an early turn that no request used."""
        prompt = self._begun.pop(name)
        if prompt.n_begun:
            self._count(prompt.request, EarlyUse(prompt.n_begun, 0))

    def _count(self, request: Request, use: EarlyUse) -> EarlyUse:
        self._loop.stats.count(n_early_used=use.n_used, n_early_wasted=use.n_begun - use.n_used)
        self._learn(request, partial(note_used, n_begun=use.n_begun, n_used=use.n_used))
        return use

    def _history(self, request: Request) -> EarlyHistory:
        """History of the agent; a new one starts with its client's."""
        history = self._histories.get(("agent", _name(request)))
        if history is None:
            return first_history(self._client_history(request))
        return history

    def _client_history(self, request: Request) -> EarlyHistory:
        return self._histories.get(("client", request.caller.client), EarlyHistory())

    def _learn(self, request: Request, learn: Callable[[EarlyHistory], EarlyHistory]) -> None:
        learned = {("agent", _name(request)): learn(self._history(request))}
        if request.caller.client:
            learned["client", request.caller.client] = learn(self._client_history(request))
        for key, history in learned.items():
            self._histories[key] = history
            self._histories.move_to_end(key)
        while len(self._histories) > MAX_HISTORIES:
            self._histories.popitem(last=False)


def _name(request: Request) -> str:
    return request.display_name or ""
