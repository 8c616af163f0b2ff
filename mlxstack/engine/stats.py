"""Engine statistics: counters, throughput, cache reuse in rolling windows, the snapshot."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

import mlx.core as mx
from msgspec.structs import astuple, replace
from prometheus_client import Histogram

from mlxstack.core.engine_events import FinishReason, RequestFailed, RequestFinished, RequestTimings
from mlxstack.core.engine_snapshot import Counters, RequestPhase, SlotView, Snapshot, WaitingView
from mlxstack.core.prompt_tokens import n_computed
from mlxstack.core.status import WindowSums
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.slots.request_state import RequestState
from mlxstack.policy.scheduling.chunked_prefill import (
    ThroughputModel,
    observe_decode,
    observe_prefill,
    prefill_s,
)
from mlxstack.policy.scheduling.scheduler_state import ACTIVE, SchedulerState, Slot, SlotState

BULK = 128
"""Shorter chunks say little about a long prompt: each has its overhead."""

MAX_COLD = 64
"""Number of latest cold prompts whose median speed counts."""

HOUR_S = 3600.0
SPANS_S = {"minute": 60.0, "hour": HOUR_S, "whole": inf}
"""Seconds of the windows; "whole" is all since the start."""
N_STEPS = 3600
"""Steps in which a window forgets: one second for an hour."""

DECODE_STEP_TIMES = Histogram(
    "mlxstack_decode_step_seconds",
    "Decode steps, from one token of the running slots to the next",
    registry=None,
    buckets=(0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
"""Steps of all engines of this process; 2 µs each."""


def plus(left: WindowSums, right: WindowSums) -> WindowSums:
    """Both together."""
    return WindowSums(*(a + b for a, b in zip(astuple(left), astuple(right), strict=True)))


def minus(whole: WindowSums, part: WindowSums) -> WindowSums:
    """One without the other, which is a part of it."""
    return WindowSums(*(a - b for a, b in zip(astuple(whole), astuple(part), strict=True)))


class SlidingWindow:
    """Sum over the last `span_s`, in steps of a 3,600th."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._parts: deque[tuple[float, WindowSums]] = deque()
        self._sum = WindowSums()

    def add(self, now: float, tally: WindowSums) -> None:
        """Count `tally` at `now`. O(1)."""
        self._sum = plus(self._sum, tally)
        if self._parts and now - self._parts[-1][0] < self._span_s / N_STEPS:
            now, before = self._parts.pop()
            tally = plus(before, tally)
        self._parts.append((now, tally))
        self.total(now)

    def total(self, now: float) -> WindowSums:
        """The sum of the last `span_s` seconds. O(1) on average."""
        while self._parts and self._parts[0][0] <= now - self._span_s:
            self._sum = minus(self._sum, self._parts.popleft()[1])
        if not self._parts:
            self._sum = WindowSums()
        return self._sum


class CacheStats:
    """All counters of the memory. Changed by one thread only."""

    def __init__(self) -> None:
        self._windows = {name: SlidingWindow(span_s) for name, span_s in SPANS_S.items()}

    def add(self, now: float, tally: WindowSums) -> None:
        """Count one request, or a part of one, at `now`."""
        for window in self._windows.values():
            window.add(now, tally)

    def rates(self, now: float) -> dict[str, WindowSums]:
        """All windows by the names of `SPANS_S`."""
        return {name: window.total(now) for name, window in self._windows.items()}


class ColdSpeed:
    """Speed of the latest cold prompts: those of which nothing was reused."""

    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=MAX_COLD)
        """Seconds per token of each."""

    def note(self, n_tokens: int, seconds: float) -> None:
        """Note a cold prompt, except a short one: it is mostly overhead."""
        if n_tokens >= BULK and seconds > 0:
            self._token_s.append(seconds / n_tokens)

    def prefill_s(self, n_tokens: int) -> float | None:
        """Seconds of tokens at the median speed; None before the first prompt."""
        if self._token_s:
            return n_tokens * median(self._token_s)
        return None


class EngineStats:
    """Owned by the MLX thread."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.speed = ThroughputModel()
        self._bulk = ThroughputModel()
        self._cold = ColdSpeed()
        self.seconds_per_request = 1.0
        self.meters = CacheStats()
        self._since_token = 0.0
        self.step_s = 0.0
        """Seconds of the last decode step, drafts included."""

    def count(self, **more: float) -> None:
        """Add to the counters of these names."""
        now = self.counters
        self.counters = replace(now, **{k: getattr(now, k) + v for k, v in more.items()})

    def prefilled(self, chunks: Sequence[range], seconds: float) -> None:
        """Record a pass over these positions of prompts."""
        n_tokens = sum(map(len, chunks))
        for chunk in chunks:
            self.observe_chunk(chunk.start, len(chunk), seconds * len(chunk) / max(1, n_tokens))
        self.count(n_prompt_tokens=n_tokens, prompt_s=seconds, n_model_calls=1)

    def decoded(self, seconds: float, n_tokens: int, plain_share: float = 1.0) -> None:
        """Time decode steps, scheduled or read; one ends with its tokens.

        Without drafts it takes `plain_share` of the seconds. Prefill chunks are sized by that:
        drafts leave room for them, not they for drafts.
        """
        self._since_token += seconds
        self.count(decode_s=seconds)
        if n_tokens:
            self.step_s = self._since_token
            DECODE_STEP_TIMES.observe(self.step_s)
            self.speed = observe_decode(self.speed, plain_share * self.step_s)
            self._since_token = 0.0

    def served(self, work: RequestTimings, seconds: float) -> None:
        """Record a request that left its slot."""
        if work.n_generated and not work.n_cached:
            self._cold.note(work.n_prompt, work.prefill_s)
        self.seconds_per_request = 0.8 * self.seconds_per_request + 0.2 * seconds
        tally = WindowSums(
            n_requests=1,
            n_hits=int(work.n_cached > 0),
            n_prompt=work.n_prompt,
            n_cached=work.n_cached,
            ttft_s=work.ttft_s,
            saved_s=work.saved_s,
        )
        self.meters.add(time.monotonic(), tally)
        n_tokens = work.n_prompt + work.n_generated if work.n_generated else 0
        most = max(self.counters.n_tokens_max, n_tokens)
        self.counters = replace(self.counters, n_tokens_max=most)

    def ended(self, last: RequestFinished | RequestFailed) -> RequestPhase:
        """Record the end of a request; its phase from now on."""
        if isinstance(last, RequestFailed):
            self.count(n_failed=1)
        elif last.reason is FinishReason.CANCELLED:
            self.count(n_cancelled=1)
            return RequestPhase.CANCELLED
        else:
            self.count(n_completed=1)
        return RequestPhase.COMPLETED

    def observe_chunk(self, start: int, n_tokens: int, seconds: float) -> None:
        """Learn the seconds of a prefill chunk from position `start` on."""
        self.speed = observe_prefill(self.speed, start, n_tokens, seconds)
        if n_tokens >= BULK:
            self._bulk = observe_prefill(self._bulk, start, n_tokens, seconds)

    def saved_s(self, n_cached: int) -> float:
        """Seconds that computing the reused tokens would have taken; 0 if unknown.

        One speed for all requests: the median of the cold prompts. Before the first of them it is
        that of the latest chunks.
        """
        cold_s = self._cold.prefill_s(n_cached)
        if cold_s is None:
            return self.expected_s(0, n_cached)
        return cold_s

    def expected_s(self, start: int, n_tokens: int) -> float:
        """Prefill seconds from position `start`, as measured; 0 if unknown."""
        return prefill_s(self._bulk if self._bulk.prefill_tps else self.speed, start, n_tokens)


def batch_counters(counters: Counters, batch: Batch, n_evicted: int) -> Counters:
    """Counters with those of the batch, its proposer and inputs."""
    return replace(
        counters,
        n_evicted=n_evicted,
        n_decode_calls=batch.n_calls,
        n_decode_rows=batch.n_rows,
        **batch.proposer.counters,
        **batch.inputs.counters,
    )


def batch_facts(facts: Snapshot, batch: Batch) -> Snapshot:
    """Facts with those of the batch's proposer."""
    proposer = batch.proposer
    return replace(facts, is_drafting=proposer.is_active, draft_model=proposer.model_name)


def build_snapshot(
    facts: Snapshot,
    state: SchedulerState,
    slots: Sequence[SlotContext],
    requests: Mapping[int, RequestState],
    counters: Counters,
    n_ctx: int,
) -> Snapshot:
    """The present on `facts`; `requests` are current or last ones of slots."""
    now = time.monotonic()
    views = tuple(
        replace(
            _slot(slot, slots[slot.id], requests.get(slot.id), n_ctx, now),
            is_reading=slot.state is SlotState.LOADING,
        )
        for slot in state.slots
    )
    waiting = tuple(
        WaitingView(
            request=t.id,
            agent=t.display_name,
            priority=t.priority,
            n_prompt=len(t.tokens),
            waited_s=max(0.0, now - t.arrived),
            pin=t.slot,
            turn_kind=t.caller.turn_kind,
        )
        for t in state.waiting
    )
    return replace(
        facts,
        at=now,
        slots=views,
        waiting=waiting,
        counters=counters,
        active_bytes=mx.get_active_memory(),
        cache_bytes=mx.get_cache_memory(),
        kv_bytes=sum(v.n_bytes for v in views),
    )


def _slot(
    slot: Slot, context: SlotContext, request_state: RequestState | None, n_ctx: int, now: float
) -> SlotView:
    idle = 0.0 if slot.state in ACTIVE else max(0.0, now - slot.last_used)
    empty = SlotView(id=slot.id, n_ctx=n_ctx, n_tokens=len(context), n_bytes=context.n_bytes)
    if request_state is None:
        return empty
    running_s = now - request_state.running_at if request_state.running_at else 0.0
    is_active = slot.state in ACTIVE
    return replace(
        empty,
        state=request_state.state,
        request=request_state.request.id,
        agent=request_state.request.display_name,
        priority=request_state.request.priority,
        turn_kind=request_state.request.caller.turn_kind,
        n_prompt=len(request_state.request.tokens),
        n_done=slot.position
        if request_state.state is RequestPhase.PREFILLING
        else len(request_state.request.tokens),
        n_cached=request_state.n_cached,
        n_decoded=request_state.n_generated,
        n_remain=max(0, request_state.request.max_tokens - request_state.n_generated),
        tps=request_state.n_generated / running_s if is_active and running_s > 0 else 0.0,
        idle_s=idle,
        is_used=True,
        miss=request_state.miss,
        elapsed_s=max(0.0, now - request_state.request.arrived) if is_active else 0.0,
        source=request_state.source,
        n_drafted=request_state.n_proposed,
        n_accepted=request_state.n_accepted,
        n_images=len(request_state.request.images),
        n_images_computed=n_computed(request_state.request.images, request_state.n_cached)
        if request_state.request.images
        else 0,
    )
