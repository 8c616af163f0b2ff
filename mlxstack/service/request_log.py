"""Remembers the last requests and the last misses, for people who ask why."""

import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.engine_events import (
    CacheMiss,
    Event,
    RequestFailed,
    RequestFinished,
    SlotAssigned,
)
from mlxstack.core.request import Request
from mlxstack.core.status import MissView, RequestView
from mlxstack.service.agents.registry import AgentRegistry

log = logging.getLogger("mlxstack.requests")

MOST_REQUESTS = 200
AROUND = 24
"""Tokens of text shown before and after the place where a prompt diverged."""

Decode = Callable[[Sequence[int]], str]


class LoggedRequest(Struct, frozen=True):
    """A finished request; `at` is Unix seconds, the miss with its text if it had one."""

    view: RequestView
    at: float
    miss: MissView | None = None


class RequestLog:
    """Fed with every event on the event loop; keeps the last requests, newest last.

    `roster` keeps account of who made them.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._slots: dict[str, SlotAssigned] = {}
        self._done: deque[LoggedRequest] = deque(maxlen=MOST_REQUESTS)
        self.agent_registry = AgentRegistry()
        self.decode: Decode | None = None

    def begin(self, request: Request) -> None:
        """The ask was submitted."""
        self._requests[request.id] = request

    def note(self, event: Event) -> None:
        """An event happened."""
        if isinstance(event, SlotAssigned):
            self._slots[event.request] = event
        elif isinstance(event, RequestFinished | RequestFailed):
            request = self._requests.pop(event.request, None)
            slot = self._slots.pop(event.request, None)
            if request is not None:
                entry = self._entry(request, slot, event)
                self._done.append(entry)
                told = replace(entry.view, miss=entry.miss)
                self.agent_registry.note(told, entry.at, is_explicit=request.agent is not None)
                _log(request, told)

    def requests(self) -> tuple[RequestView, ...]:
        """The last requests, the newest first."""
        now = time.time()
        return tuple(
            replace(e.view, age_s=now - e.at, miss=_aged(e.miss, now - e.at))
            for e in reversed(self._done)
        )

    def find(self, name: str) -> RequestView | None:
        """The newest request with this id, or of this agent."""
        return next((r for r in self.requests() if name in (r.id, r.agent)), None)

    def _entry(
        self, request: Request, slot: SlotAssigned | None, end: RequestFinished | RequestFailed
    ) -> LoggedRequest:
        view = RequestView(
            id=request.id,
            agent=request.display_name,
            n_prompt=len(request.tokens),
            ended=end.reason.value if isinstance(end, RequestFinished) else "failed",
        )
        if isinstance(end, RequestFinished):
            work = end.timings
            view = replace(
                view,
                n_cached=work.n_cached,
                n_generated=work.n_generated,
                queued_s=work.queued_s,
                prefill_s=work.prefill_s,
                decode_s=work.decode_s,
                ttft_s=work.ttft_s,
                saved_s=work.saved_s,
            )
        if slot is None:
            return LoggedRequest(view, time.time())
        view = replace(view, slot=slot.slot, source=slot.source)
        miss = None if slot.miss is None else self._miss(request, slot.miss, view)
        return LoggedRequest(view, time.time(), miss)

    def _miss(self, request: Request, miss: CacheMiss, view: RequestView) -> MissView:
        """Describe a miss; its seconds are those of the lost tokens' share of the prefill."""
        n_lost = min(miss.n_lost, max(0, view.n_prompt - view.n_cached))
        shown = MissView(
            reason=miss.reason,
            at=miss.at,
            request=request.id,
            agent=request.display_name,
            n_lost=n_lost,
            lost_s=view.prefill_s * n_lost / max(1, view.n_prompt - view.n_cached),
        )
        if miss.at is None or self.decode is None:
            return shown
        return replace(
            shown,
            text_shared=self.decode(request.tokens[max(0, miss.at - AROUND) : miss.at]),
            text_cached=self.decode(miss.instead),
            text_sent=self.decode(request.tokens[miss.at : miss.at + AROUND]),
        )


def _log(request: Request, view: RequestView) -> None:
    """One line of `name=value`; nothing of what was said, and nobody's name unquoted."""
    log.info(
        "request=%s id=%s agent=%s slot=%s priority=%s prompt=%d cached=%d generated=%d "
        "queued_ms=%.0f ttft_ms=%.0f decode_ms=%.0f ended=%s miss=%s",
        request.request_id or "-", view.id, json.dumps(view.agent),
        "-" if view.slot is None else view.slot,
        request.priority.name.lower(), view.n_prompt, view.n_cached, view.n_generated,
        1000 * view.queued_s, 1000 * view.ttft_s, 1000 * view.decode_s, view.ended,
        view.miss.reason if view.miss else "-",
    )  # fmt: skip


def _aged(miss: MissView | None, age_s: float) -> MissView | None:
    return None if miss is None else replace(miss, age_s=age_s)
