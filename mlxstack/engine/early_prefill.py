"""Early turns: prefill of expected prompts in idle slots. MLX thread only."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from mlxstack.core.engine_events import EarlyUse
from mlxstack.core.request import Request
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.prefill import prefill_chunk
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.engine.stats import EngineStats
from mlxstack.policy.kv.prefix_index import common_tokens
from mlxstack.policy.scheduling import scheduler_state
from mlxstack.policy.scheduling.early_history import (
    EarlyHistory,
    first_history,
    may_begin,
    note_begun,
    note_used,
)
from mlxstack.policy.scheduling.scheduler_state import EarlyTurn, SchedulerState

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


class EarlyPrefill:
    """Computes early turns, and learns from their use."""

    def __init__(self, slot_kv: SlotKVManager, batch: Batch, stats: EngineStats) -> None:
        self._slot_kv = slot_kv
        self._batch = batch
        self._stats = stats
        self._prompts: dict[int, EarlyPrompt] = {}
        self.begun: OrderedDict[str, EarlyPrompt] = OrderedDict()
        """Expected prompts by agent, until the real ones come."""
        self._histories: OrderedDict[tuple[str, str], EarlyHistory] = OrderedDict()

    def expect(self, request: Request, slot: int) -> None:
        """Note the expected prompt of an idle slot."""
        self._prompts[slot] = EarlyPrompt(request, self._slot_kv.slots[slot].version)

    def is_current(self, slot: int) -> bool:
        """Whether the context is still as the early turn left it."""
        return self._prompts[slot].version == self._slot_kv.slots[slot].version

    def advance(self, state: SchedulerState, turn: EarlyTurn, n_tokens: int) -> SchedulerState:
        """Begin an early turn, or prefill its next chunk; the state after that."""
        if turn.position is None:
            start = self.prepare(turn.slot)
            if start is None:
                return scheduler_state.end_early(state, turn.slot)
            return scheduler_state.advance_early(state, turn, start, start)
        idle = [slot for slot in scheduler_state.idle_slots(state) if slot != turn.slot]
        end = self.compute(turn.slot, n_tokens, idle)
        return scheduler_state.advance_early(state, turn, end, turn.position)

    def prepare(self, slot: int) -> int | None:
        """Find the cached prefix; its length, None for a worthless rest."""
        prompt = self._prompts[slot]
        slots = self._slot_kv.slots
        request = prompt.request
        plan, _ = self._slot_kv.lookup.find(request, slots, slot, may_read=False)
        n_left = len(request.tokens) - 1 - plan.position
        history = self._history(request)
        fits = self._slot_kv.need(request) <= self._slot_kv.prefix_cache.budget
        # A tower would run for a prompt that may never come.
        is_text = all(image.end <= plan.position for image in request.images)
        if not (fits and is_text and may_begin(history, n_left, time.monotonic())):
            return None
        self._slot_kv.prepare_slot(request, slot, plan, is_expected=True)
        prompt.start = prompt.end = plan.position
        prompt.version = slots[slot].version
        self._note(prompt)
        return plan.position

    def compute(self, slot: int, n_tokens: int, idle: Sequence[int]) -> int:
        """Prefill a chunk; the new position. `idle` slots may be parked."""
        prompt = self._prompts[slot]
        context = self._slot_kv.slots[slot]
        request = prompt.request
        start = len(context)
        self._slot_kv.admit_growth(context, self._slot_kv.need(request), idle)
        took = prefill_chunk(self._batch, context, request, n_tokens)
        prompt.end = len(context)
        prompt.version = context.version
        self._slot_kv.note_growth()
        self._stats.begun_early(start, prompt.end - start, took)
        n_begun = prompt.end - start
        now = time.monotonic()
        self._learn(request, partial(note_begun, n_tokens=n_begun, now=now))
        return prompt.end

    def settle(self, request: Request, n_cached: int) -> EarlyUse | None:
        """Use of an early turn by the next request of the agent."""
        prompt = self.begun.get(_name(request))
        if prompt is None or prompt.request.salt != request.salt or not request.use_cache:
            return None
        del self.begun[_name(request)]
        n_common = min(common_tokens(prompt.request, request), n_cached)
        use = EarlyUse(prompt.n_begun, max(0, min(n_common, prompt.end) - prompt.start))
        return self._count(request, use) if use.n_begun else None

    def _note(self, prompt: EarlyPrompt) -> None:
        """Keep the expected tokens, to compare them to the real ones."""
        name = _name(prompt.request)
        if name in self.begun:
            self._waste(name)
        self.begun[name] = prompt
        if len(self.begun) > MAX_AGENTS:
            self._waste(next(iter(self.begun)))

    def _waste(self, name: str) -> None:
        """Count an early turn that no request used."""
        prompt = self.begun.pop(name)
        if prompt.n_begun:
            self._count(prompt.request, EarlyUse(prompt.n_begun, 0))

    def _count(self, request: Request, use: EarlyUse) -> EarlyUse:
        self._stats.count(n_early_used=use.n_used, n_early_wasted=use.n_begun - use.n_used)
        self._learn(request, partial(note_used, n_begun=use.n_begun, n_used=use.n_used))
        return use

    def _history(self, request: Request) -> EarlyHistory:
        """History of the agent; a new one starts with its client's."""
        known = self._histories.get(("agent", _name(request)))
        if known is None:
            return first_history(self._client_history(request))
        return known

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
