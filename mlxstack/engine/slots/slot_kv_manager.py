"""Slot preparation: reuse of KV, parking and memory admission."""

import logging
import time
from collections.abc import Sequence

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.commands import FlushResult
from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.errors import OutOfMemory
from mlxstack.core.preset import Persist
from mlxstack.core.prompt_tokens import TokenRow
from mlxstack.core.request import Request
from mlxstack.engine.decode.prefill import room_for
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.park import BackgroundSteps, IncrementalPack, IndexedContext
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.token_inputs import PLAIN_TOKENS, TokenInputs
from mlxstack.engine.slots.kv_provider import Ready
from mlxstack.engine.slots.prefix_lookup import PrefixLookup
from mlxstack.engine.slots.request_state import RequestState
from mlxstack.policy.kv.parking import ContextFacts, is_stored, is_worth_parking
from mlxstack.policy.kv.prefix_index import common_tokens
from mlxstack.policy.kv.reuse_plan import ReusePlan
from mlxstack.policy.kv.shared_prefixes import SharedPrefixTokens

log = logging.getLogger(__name__)

ROOM_EVERY = 16
MAX_LOADS = 3
"""Maximum disk reads per request; then it starts from memory."""


class AsideContext(Struct, frozen=True):
    """Context of a slot whose request drops its KV."""

    context: SlotContext
    is_storing: bool
    """Whether its last answer was still being packed."""


class SlotKVManager:
    """KV of all slots: reuse, parking, memory admission. MLX thread only.

    A token adds `bytes_per_token` to a live context. The device has room for `array_limit` bytes
    of arrays; 0 without a limit.
    """

    inputs: TokenInputs = PLAIN_TOKENS
    """Inputs of prompts, whose bytes count as KV."""

    def __init__(
        self,
        slots: Sequence[SlotContext],
        prefix_cache: PrefixCache,
        disk_tier: DiskTier,
        background: BackgroundSteps,
        persist: Persist,
        bytes_per_token: int,
        array_limit: int = 0,
    ) -> None:
        self.background = background
        self._persist = persist
        self.lookup = PrefixLookup(
            prefix_cache, disk_tier.parker.shared_prefixes, disk_tier.is_foreign
        )
        self._parker = disk_tier.parker
        self.slots = slots
        self.prefix_cache = prefix_cache
        self.disk_tier = disk_tier
        self._is_room_due = False
        self._storing: set[int] = set()
        self._aside: dict[int, AsideContext] = {}
        """Contexts of slots whose requests drop their KV."""
        self.bytes_per_token = bytes_per_token
        self.array_limit = array_limit
        self._planned = prefix_cache.budget

    @property
    def sources(self) -> list[SlotContext]:
        """Contexts to reuse: of the slots, then those set aside."""
        return [*self.slots, *(aside.context for aside in self._aside.values())]

    @property
    def live_bytes(self) -> int:
        """Bytes of live contexts with promised room, last prompts, and inputs.

        A checkpoint that is shared or parked too counts once.
        """
        live = self.sources
        own = {id(mark): mark for context in live for mark in context.checkpoints}
        checkpoints = sum(
            mark.n_bytes for mark in own.values() if not self.prefix_cache.contains(mark)
        )
        contexts = sum(context.cache_bytes + context.n_unreserved for context in live)
        companions = sum(context.companion_bytes for context in live)
        return checkpoints + contexts + companions + self.lookup.n_bytes + self.inputs.n_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Whether `n_bytes` fit in addition to all live KV."""
        is_within = self.live_bytes + n_bytes <= self.prefix_cache.budget
        return is_within and not self._is_beyond_device(n_bytes)

    def drop_copies(self) -> None:
        """Drop companions, shared arrays and unused inputs, which only save time."""
        for context in self.sources:
            context.companion = None
            context.take_back()
        self.inputs.drop()

    @property
    def learned(self) -> tuple[SharedPrefixTokens, ...]:
        """Prefixes that several conversations share."""
        return self._parker.shared_prefixes.learned

    def nearest(self, row: TokenRow, salt: str) -> tuple[int, SlotContext | None]:
        """The live context that shares most of these tokens, and how many."""
        contexts = [context for context in self.slots if context.salt == salt]
        shared = [(common_tokens(context, row), context) for context in contexts]
        return max(shared, key=lambda pair: pair[0], default=(0, None))

    def need(self, request: Request) -> int:
        """Bytes of live KV for the prompt and its answer's start."""
        return self.bytes_per_token * room_for(request)

    def too_big(self, request: Request) -> OutOfMemory:
        """Error for a request beyond the KV budget, with numbers."""
        return OutOfMemory(
            f"a prompt of {len(request.tokens)} tokens needs {self.need(request)} bytes of KV, the "
            f"whole budget is {self.prefix_cache.budget}; shorten it, raise "
            "prefix_cache.memory_budget_pct, or use fewer kv.bits where the model can"
        )

    def find(self, request_state: RequestState, slot: int) -> tuple[ReusePlan, CacheMiss | None]:
        """Best restore point of a request, and the miss; see `PrefixLookup.find`.

        A request that drops its KV brings none from disk to memory.
        """
        request = request_state.request
        may_read = request_state.n_loads < MAX_LOADS and not request.drops_kv
        return self.lookup.find(request, self.sources, slot, may_read=may_read)

    def bring(self, request_state: RequestState, plan: ReusePlan, ready: Ready) -> bool:
        """Start the plan's disk reads, if any; `ready` follows."""
        missing = self.prefix_cache.missing(plan)
        if not missing:
            return False
        nodes = self.prefix_cache.index.nodes
        self._make_way(plan, sum(nodes[key].record.n_bytes for key in missing))
        self.disk_tier.load(missing, ready)
        request_state.n_loads += 1
        return True

    def stop(self, request_id: str) -> None:
        """Let reads go on: what they bring is of use for others."""

    def prepare_slot(
        self, request: Request, slot: int, plan: ReusePlan, *, is_expected: bool = False
    ) -> None:
        """Make the slot's context the planned beginning of the prompt.

        What it held before and the prompt does not continue is parked where it is worth it, or set
        aside for a request that drops its KV. A prompt that is only expected explains no later
        miss, and what it does not continue is the first to be evicted.
        """
        mine = self.slots[slot]
        now = time.monotonic()
        origin = None
        if plan.source is KVSource.FORK and plan.slot is not None:
            origin = self.sources[plan.slot]
        if request.drops_kv:
            aside = self._set_aside(slot)
            if origin is mine:
                origin = aside
        n_kept = plan.position if plan.source is KVSource.SLOT else 0
        if is_worth_parking(_facts(mine), n_kept, self.prefix_cache.spec.block_size):
            # Parking adds a checkpoint, which must not evict the one that the plan goes back to.
            parked = self.park(mine, spared=n_kept)
            if is_expected and parked is not None:
                self.prefix_cache.retention.abandon(parked.new, plan.position)
        end = plan.position
        if plan.source is KVSource.SLOT:
            if end == len(request.tokens) - 1 and not is_expected:
                # With the logits after the same prompt its last token needs no pass either.
                end += mine.logits_after(request.tokens) is not None
            mine.rewind(end)
        else:
            mine.clear()
        n_tokens = room_for(request)
        self._make_way(plan, self.bytes_per_token * (n_tokens - len(mine)))
        if origin is not None:
            fresh = mine.new_empty()
            fresh.fork_from(origin, plan.position, n_tokens)
            mine.take_over(fresh)
        elif plan.path:
            self._parker.restore_context(mine, request, plan, n_tokens, now)
        assert len(mine) == end, f"{len(mine)} tokens instead of {end}"
        mine.assign(request.salt, request.agent, len(request.tokens))
        if not (is_expected or request.drops_kv):
            self.lookup.remember(request)
        # What was copied may go now, and idle slots at the end of this step.
        self._is_room_due = True
        self.prefix_cache.make_room(self.live_bytes + self.bytes_per_token * (n_tokens - len(mine)))

    def park(self, context: SlotContext, spared: int = 0) -> IndexedContext | None:
        """Park unknown KV of this context, and write it to disk.

        The context keeps its checkpoint at position `spared`. None if it cannot be kept.
        """
        spec = self.prefix_cache.spec
        if not spec.enabled or not context.is_storable:
            return None
        context.checkpoint(spared)
        indexed = self._parker.park(context, time.monotonic())
        if self._is_stored(context):
            due = self.disk_tier.due_of(context, indexed)
            self._write(context, due, is_deferred=True)
        return indexed

    def end_request(self, slot: int) -> None:
        """Detach or drop a finished request's context; write an agent's if configured."""
        self._is_room_due = True
        if slot in self._aside:
            self._put_back(slot)
            return
        self.slots[slot].detach()
        if self.slots[slot].agent is not None and self._persist is Persist.AFTER_TURN:
            self._store_in_pieces(self.slots[slot])

    def n_tokens_after(self, slot: int) -> int:
        """Tokens in the slot when its request has ended."""
        if slot in self._aside:
            return len(self._aside[slot].context)
        return len(self.slots[slot])

    def drop_aside(self, slot: int) -> None:
        """Drop the context set aside for the request in this slot."""
        self._aside.pop(slot, None)

    def _set_aside(self, slot: int) -> SlotContext:
        """Move the slot's context aside, which leaves the slot empty."""
        mine = self.slots[slot]
        aside = mine.new_empty()
        aside.take_over(mine)
        self._aside[slot] = AsideContext(aside, is_storing=self.is_storing(slot))
        mine.clear()
        return aside

    def _put_back(self, slot: int) -> None:
        """Give the slot back the context that was set aside."""
        aside = self._aside.pop(slot)
        mine = self.slots[slot]
        mine.clear()
        if len(aside.context):
            mine.take_over(aside.context)
        if aside.is_storing:
            self._store_in_pieces(mine)

    def limit(self, n_bytes: int) -> int:
        """Bound the budget that was planned at the load; the budget."""
        self.prefix_cache.budget = min(self._planned, n_bytes)
        self._is_room_due = True
        return self.prefix_cache.budget

    def note_growth(self) -> None:
        """Note growth of an idle context; the step enforces the budget."""
        self._is_room_due = True

    def maintain(self, step: int, idle: Sequence[int], *, is_busy: bool = False) -> None:
        """Enforce the KV budget every few steps, and submit writes.

        Deferred writes wait while the engine is busy: it computes a prompt or decodes.
        """
        if self.disk_tier.has_deferred:
            self.disk_tier.submit_pending(is_busy=is_busy)
        if self._is_room_due or step % ROOM_EVERY == 0:
            self.make_room(idle)
            self._is_room_due = False

    def make_room(self, idle: Sequence[int], ahead: int = 0) -> None:
        """Bring live and parked bytes, and those `ahead`, under the budget.

        `idle` slots may go, in this order.
        """
        if self.live_bytes + ahead > self.prefix_cache.budget:
            self.drop_copies()
        self.prefix_cache.make_room(self.live_bytes + ahead)
        for slot in idle:
            if self.live_bytes + ahead <= self.prefix_cache.budget:
                return
            self.flush_and_clear(self.slots[slot])

    def reserve_memory(self, context: SlotContext, n_bytes: int, idle: Sequence[int]) -> None:
        """Make room for a context of `n_bytes` instead of this one.

        `idle` slots may go. Raises OutOfMemory when the budget can never hold it.
        """
        if n_bytes > self.prefix_cache.budget:
            raise OutOfMemory(
                f"the saved context has {n_bytes} bytes of KV, the whole budget is "
                f"{self.prefix_cache.budget}; raise prefix_cache.memory_budget_pct"
            )
        more = max(0, n_bytes - context.n_bytes)
        self.make_room(idle, more)
        self._refuse_beyond_device(more)

    def admit_growth(self, context: SlotContext, n_bytes: int, idle: Sequence[int]) -> None:
        """Make room on the device for a context to grow to `n_bytes`.

        Parked KV goes first, then `idle` slots. Raises OutOfMemory when that is not enough.
        """
        more = n_bytes - context.cache_bytes - context.n_unreserved
        if not self.array_limit or more <= 0:
            return
        self.prefix_cache.make_room(self.live_bytes + max(more, self._shortage(more)))
        for slot in idle:
            if self._held() + more <= self.array_limit:
                break
            self.flush_and_clear(self.slots[slot])
        self._refuse_beyond_device(more)

    def _make_way(self, plan: ReusePlan, n_bytes: int) -> None:
        """Make room for `n_bytes` without evicting the plan."""
        self.prefix_cache.index.lock(plan.keys)
        self.prefix_cache.make_room(self.live_bytes + max(n_bytes, self._shortage(n_bytes)))
        self.prefix_cache.index.unlock(plan.keys)
        self._refuse_beyond_device(n_bytes)

    def _shortage(self, n_bytes: int) -> int:
        """Bytes to free so that the device holds `n_bytes` more."""
        if not self.array_limit:
            return 0
        parked = self.prefix_cache.n_bytes
        over = self._held() + n_bytes - self.array_limit
        if over > 0:
            return min(over, parked) + self.prefix_cache.budget - self.live_bytes - parked
        return 0

    def _refuse_beyond_device(self, n_bytes: int) -> None:
        """Raise OutOfMemory without device memory: the GPU would fail all rows."""
        if self._is_beyond_device(n_bytes):
            self.drop_copies()
        if self._is_beyond_device(n_bytes):
            raise OutOfMemory(
                f"{n_bytes} more bytes of KV are needed, and {self._held()} of the "
                f"{self.array_limit} that the device has room for are in use; try again when other "
                "requests have ended, or lower slots.count, slots.n_ctx or kv.bits"
            )

    def _is_beyond_device(self, n_bytes: int) -> bool:
        return 0 < self.array_limit < self._held() + n_bytes

    def _held(self) -> int:
        """Bytes of the device in use, and those that contexts are promised."""
        promised = sum(context.n_unreserved for context in self.slots)
        return int(mx.get_active_memory()) + promised

    def flush_and_clear(self, context: SlotContext) -> None:
        """Store a context on disk and empty its slot."""
        try:
            self.store(context)
        finally:
            context.clear()

    def park_all(self) -> FlushResult:
        """Write all contexts that may be on disk; slots stay."""
        before = self.disk_tier.writing.n_written
        held = [context for context in self.slots if len(context)]
        for context in held:
            self.store(context)
        spec = self.prefix_cache.spec
        if spec.enabled and spec.disk.enabled and self._persist is not Persist.NEVER:
            self.disk_tier.write_rest()
        self.disk_tier.catch_up()
        return FlushResult(len(held), self.disk_tier.writing.n_written - before)

    def store(
        self, context: SlotContext, *, is_leaving: bool = True, is_deferred: bool = False
    ) -> None:
        """Write this context's missing KV that is due; memory releases it."""
        if self._is_stored(context):
            due = self.disk_tier.index_due(context, is_leaving=is_leaving)
            self._write(context, due, is_deferred=is_deferred)

    def is_storing(self, slot: int) -> bool:
        """Whether this slot's last answer is still being packed."""
        return id(self.slots[slot]) in self._storing

    def _store_in_pieces(self, context: SlotContext) -> None:
        """Store in pieces; after a change the next user stores."""
        if not self._is_stored(context):
            return
        packing = IncrementalPack(context, self._parker)

        def end() -> None:
            self._storing.discard(id(context))
            if packing.is_current:
                self.store(context, is_leaving=False, is_deferred=True)

        def fail(error: Exception) -> None:
            self._storing.discard(id(context))
            raise_device_error(error)
            log.error("could not park the slot after a response", exc_info=error)

        def step() -> bool:
            self._is_room_due = True
            return packing.go_on()

        self._storing.add(id(context))
        self.background.run(step, end, fail)

    def _is_stored(self, context: SlotContext) -> bool:
        return is_stored(_facts(context), self.prefix_cache.spec, self._persist)

    def _write(
        self, context: SlotContext, indexed: IndexedContext, *, is_deferred: bool = False
    ) -> None:
        self.disk_tier.write(indexed, is_deferred=is_deferred)
        if indexed.segments:
            self.disk_tier.put(context, indexed, is_deferred=is_deferred)


def _facts(context: SlotContext) -> ContextFacts:
    return ContextFacts(
        n_tokens=len(context),
        has_agent=context.agent is not None,
        is_sliceable=context.is_sliceable,
        is_storable=context.is_storable,
    )
