"""Log of the last requests, with the reasons of their misses."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, msgpack
from msgspec.structs import replace
from prometheus_client import Histogram

from mlxstack.core.engine_events import (
    CacheMiss,
    Event,
    RequestFailed,
    RequestFinished,
    SlotAssigned,
    TTFTPhase,
)
from mlxstack.core.engine_snapshot import SlotView, Snapshot
from mlxstack.core.prompt_tokens import n_computed
from mlxstack.core.request import Request
from mlxstack.core.status import MissSums, MissView, RequestView
from mlxstack.service.parts.agent_registry import AgentRegistry, age_s
from mlxstack.service.parts.stats import BUSY

log = logging.getLogger("mlxstack.requests")

MAX_REQUESTS = 200
AROUND = 24
"""Tokens of text shown on both sides of a divergence."""

COSTS = (
    "n_cached", "n_generated", "decode_s", "ttft_s", "saved_s", "n_drafted", "n_accepted",
    "loops",
    *TTFTPhase,
)  # fmt: skip
"""Fields of a finished request that its view shares with its timings."""

WAITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Bounds of the histograms of waiting times."""

Decode = Callable[[Sequence[int]], str]


class LoggedRequest(Struct, frozen=True):
    """Finished request; `at` is Unix seconds, `miss` has its text."""

    view: RequestView
    at: float
    miss: MissView | None = None
    session: str | None = None
    """Session hint of its client."""


class SlotStatus(Struct, frozen=True):
    """Slot as the engine sees it, with its last request."""

    view: SlotView
    last: Request | None

    @property
    def is_processing(self) -> bool:
        """True while a request is served in it."""
        return self.view.state in BUSY


class RequestLog:
    """Last requests, newest last, fed with every event on the event loop.

    Those that the service makes in the background are left out. Each is kept as one block of
    bytes: small objects that outlive a burst of requests would keep its memory from the system.
    """

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Request, Decode]] = {}
        self._slots: dict[str, SlotAssigned] = {}
        self._done: deque[bytes] = deque(maxlen=MAX_REQUESTS)
        self._losses: dict[str, MissSums] = {}
        self.observers: list[Callable[[Request, RequestView], None]] = []
        """Called with each request that ended."""
        self.last_in_slot: dict[int, Request] = {}
        """Last request of each slot, until the engine is gone."""
        self.agent_registry = AgentRegistry()
        self.first_token_times = Histogram(
            "mlxstack_time_to_first_token_seconds",
            "Requests with a token, from their arrival to the first one",
            registry=None,
            buckets=WAITS_S,
        )
        self.queue_times = Histogram(
            "mlxstack_queue_time_seconds",
            "Requests with a token, from their arrival to their slot",
            registry=None,
            buckets=WAITS_S,
        )

    def begin(self, request: Request, decode: Decode) -> None:
        """Note a submitted request, and the detokenizer of its model."""
        self._requests[request.id] = request, decode

    def note(self, event: Event) -> None:
        """Note an event."""
        if isinstance(event, SlotAssigned):
            self._slots[event.request] = event
            begun = self._requests.get(event.request)
            if begun is not None and not begun[0].drops_kv:
                self.last_in_slot[event.slot] = begun[0]
        elif isinstance(event, RequestFinished | RequestFailed):
            begun = self._requests.pop(event.request, None)
            slot = self._slots.pop(event.request, None)
            if begun is not None and not begun[0].is_background:
                request, decode = begun
                view = _view(request, slot, event)
                miss = None
                if slot is not None and slot.miss is not None:
                    miss = _miss(request, slot.miss, decode, view)
                entry = LoggedRequest(view, time.time(), miss, request.caller.session_hint)
                self._done.append(msgpack.encode(entry))
                if view.n_generated:
                    self.first_token_times.observe(view.ttft_s)
                    self.queue_times.observe(view.queued_s)
                if miss is not None:
                    self._count(miss)
                view = replace(view, miss=miss)
                self.agent_registry.note(view, entry.at, is_explicit=request.agent is not None)
                _log(request, view)
                for observe in self.observers:
                    observe(request, view)

    def requests(self) -> tuple[RequestView, ...]:
        """Last requests, the newest first."""
        return tuple(map(_aged_view, self._entries()))

    def of_session(self, hint: str) -> tuple[RequestView, ...]:
        """Last requests with this session hint, the newest first."""
        return tuple(_aged_view(entry) for entry in self._entries() if entry.session == hint)

    def slots(self, now: Snapshot) -> tuple[SlotStatus, ...]:
        """All slots, in the order of their ids."""
        return tuple(SlotStatus(view, self.last_in_slot.get(view.id)) for view in now.slots)

    @property
    def losses(self) -> tuple[MissSums, ...]:
        """Misses since the start by reason, the costliest first."""
        return tuple(sorted(self._losses.values(), key=lambda loss: -loss.lost_s))

    def find(self, name: str) -> RequestView | None:
        """Newest request with this id, or of this agent."""
        return next((r for r in self.requests() if name in (r.id, r.agent)), None)

    def _entries(self) -> Iterator[LoggedRequest]:
        """Logged requests, the newest first."""
        return (msgpack.decode(data, type=LoggedRequest) for data in reversed(self._done))

    def _count(self, miss: MissView) -> None:
        sums = self._losses.get(miss.reason, MissSums(miss.reason))
        self._losses[miss.reason] = replace(
            sums,
            n_misses=sums.n_misses + 1,
            n_lost=sums.n_lost + miss.n_lost,
            lost_s=sums.lost_s + miss.lost_s,
        )


def misses_of(requests: tuple[RequestView, ...], limit: int) -> tuple[MissView, ...]:
    """Latest misses, newest first; of many, the most expensive ones."""
    misses = [view.miss for view in requests if view.miss is not None]
    costly = sorted(misses, key=lambda miss: -miss.lost_s)[:limit]
    return tuple(sorted(costly, key=lambda miss: miss.age_s))


def _view(
    request: Request, slot: SlotAssigned | None, end: RequestFinished | RequestFailed
) -> RequestView:
    view = RequestView(
        id=request.id,
        agent=request.display_name,
        n_prompt=len(request.tokens),
        ended="failed",
        thinking=request.thinking,
        priority=request.priority,
        turn_kind=request.caller.turn_kind,
        drops_kv=request.drops_kv,
        repeated_call=request.repeated_call,
    )
    if slot is not None:
        view = replace(view, slot=slot.slot, source=slot.source)
        if slot.early is not None:
            n_begun = slot.early.n_begun
            view = replace(view, n_begun_early=n_begun, n_used_early=slot.early.n_used)
    if isinstance(end, RequestFinished):
        work = end.timings
        view = replace(
            view,
            ended=end.reason.value,
            n_images=len(request.images),
            n_images_computed=n_computed(request.images, work.n_cached),
            **{name: getattr(work, name) for name in COSTS},
        )
    return view


def _miss(request: Request, miss: CacheMiss, decode: Decode, view: RequestView) -> MissView:
    """Describe a miss, with the lost tokens' share of the prefill time."""
    miss_view = MissView(
        reason=miss.reason,
        at=miss.at,
        request=request.id,
        agent=request.display_name,
        n_lost=miss.n_lost,
        lost_s=view.prefill_s * miss.n_lost / max(1, view.n_prompt - view.n_cached),
    )
    if miss.at is None:
        return miss_view
    return replace(
        miss_view,
        text_shared=decode(request.tokens[max(0, miss.at - AROUND) : miss.at]),
        text_cached=decode(miss.instead),
        text_sent=decode(request.tokens[miss.at : miss.at + AROUND]),
    )


def _log(request: Request, view: RequestView) -> None:
    """Log a finished request: its figures as fields, without its text."""
    fields = {
        "request": request.caller.request_id,
        "id": view.id,
        "agent": view.agent,
        "slot": view.slot,
        "priority": request.priority.name.lower(),
        "turn_kind": request.caller.turn_kind.value,
        "prompt": view.n_prompt,
        "cached": view.n_cached,
        "generated": view.n_generated,
        "queued_ms": round(1000 * view.queued_s),
        "others_ms": round(1000 * view.others_s),
        "ttft_ms": round(1000 * view.ttft_s),
        "decode_ms": round(1000 * view.decode_s),
        "ended": view.ended,
        "miss": view.miss.reason if view.miss else None,
    }
    log.info("request finished", extra={"fields": fields})


def _aged_view(entry: LoggedRequest) -> RequestView:
    age = age_s(time.time(), entry.at)
    miss = replace(entry.miss, age_s=age) if entry.miss is not None else None
    return replace(entry.view, age_s=age, miss=miss)
