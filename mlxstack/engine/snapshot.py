"""Draws the snapshot of the engine that every other thread may read."""

import time
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxstack.core.engine_snapshot import Counters, RequestPhase, SlotView, Snapshot, WaitingView
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.request_state import RequestState
from mlxstack.policy.scheduler_state import ACTIVE, SchedulerState, Slot


def build_snapshot(
    state: SchedulerState,
    slots: Sequence[SlotContext],
    shown: Mapping[int, RequestState],
    counters: Counters,
    n_ctx: int,
    turn: int,
) -> Snapshot:
    """`shown` holds for each slot the ask in it, or the last one that was."""
    now = time.monotonic()
    views = tuple(
        _slot(slot, slots[slot.id], shown.get(slot.id), n_ctx, now) for slot in state.slots
    )
    waiting = tuple(
        WaitingView(t.request, t.name, t.priority, t.n_prompt, max(0.0, now - t.arrived), t.pin)
        for t in state.waiting
    )
    return Snapshot(
        at=now,
        turn=turn,
        slots=views,
        waiting=waiting,
        counters=counters,
        active_bytes=mx.get_active_memory(),
        cache_bytes=mx.get_cache_memory(),
        kv_bytes=sum(view.n_bytes for view in views),
    )


def _slot(
    slot: Slot, context: SlotContext, live: RequestState | None, n_ctx: int, now: float
) -> SlotView:
    idle = 0.0 if slot.state in ACTIVE else max(0.0, now - slot.last_used)
    empty = SlotView(id=slot.id, n_ctx=n_ctx, n_tokens=len(context), n_bytes=context.n_bytes)
    if live is None:
        return empty
    running_s = now - live.running_at if live.running_at else 0.0
    is_active = slot.state in ACTIVE
    return SlotView(
        id=slot.id,
        n_ctx=n_ctx,
        state=live.state,
        request=live.request.id,
        agent=live.request.agent or live.request.display_name,
        n_tokens=len(context),
        n_prompt=len(live.request.tokens),
        n_done=slot.position if live.state is RequestPhase.PREFILLING else len(live.request.tokens),
        n_cached=live.n_cached,
        n_decoded=live.n_generated,
        n_remain=max(0, live.request.max_tokens - live.n_generated),
        tps=live.n_generated / running_s if is_active and running_s > 0 else 0.0,
        n_bytes=context.n_bytes,
        idle_s=idle,
        elapsed_s=max(0.0, now - live.request.arrived) if is_active else 0.0,
        source=live.source,
        is_used=True,
        miss=live.miss,
    )
