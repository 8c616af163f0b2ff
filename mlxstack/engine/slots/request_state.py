"""State of a request in the engine: limits, stop tokens, timings."""

from mlxstack.core.engine_events import (
    CacheMiss,
    FinishReason,
    KVSource,
    RequestFinished,
    RequestTimings,
)
from mlxstack.core.engine_snapshot import RequestPhase
from mlxstack.core.request import Request
from mlxstack.engine.decode.drafter import Drafter


class RequestState:
    """Owned by the MLX thread. Times are seconds of the monotonic clock."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = RequestPhase.WAITING
        self.slot: int | None = None
        self.n_cached = 0
        self.source = KVSource.NONE
        self.miss: CacheMiss | None = None
        self.n_generated = 0
        self.n_loads = 0
        self.is_fetched = False
        self.is_assigned = False
        self.ended_step = -1
        self.seated_at = request.arrived
        self.running_at = 0.0
        self.first_at = 0.0
        self.prefill_s = 0.0
        self.saved_s = 0.0
        self.drafter: Drafter | None = None

    def choose(self, token: int, now: float, n_ctx: int) -> FinishReason | None:
        """Count a sampled token; the finish reason if it was the last.

        `n_ctx` tokens fit the slot, prompt and answer together.
        """
        if self.n_generated == 0:
            self.first_at = now
        self.n_generated += 1
        if token in self.request.eos:
            return FinishReason.EOS
        if self.n_generated >= self.request.max_tokens:
            return FinishReason.LENGTH
        if len(self.request.tokens) + self.n_generated >= n_ctx:
            return FinishReason.CONTEXT
        return None

    def finish(self, reason: FinishReason, now: float) -> RequestFinished:
        """The request's last event."""
        return RequestFinished(self.request.id, reason, self.work(now))

    def work(self, now: float) -> RequestTimings:
        """Timings of the request until now."""
        arrived = self.request.arrived
        return RequestTimings(
            n_prompt=len(self.request.tokens),
            n_cached=self.n_cached,
            n_generated=self.n_generated,
            queued_s=max(0.0, self.seated_at - arrived),
            prefill_s=self.prefill_s,
            decode_s=max(0.0, now - self.running_at) if self.running_at else 0.0,
            ttft_s=max(0.0, self.first_at - arrived) if self.first_at else 0.0,
            saved_s=self.saved_s,
            n_drafted=self.drafter.n_drafted if self.drafter else 0,
            n_accepted=self.drafter.n_accepted if self.drafter else 0,
            n_image=sum(image.end - image.start for image in self.request.images),
        )
