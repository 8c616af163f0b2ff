"""State of a request in the engine: limits, stop tokens, timings."""

import time
from collections.abc import Collection, Mapping, Sequence

from mlxstack.core.engine_events import (
    CacheMiss,
    FinishReason,
    KVSource,
    RequestFinished,
    RequestTimings,
    SlotAssigned,
    TTFTPhase,
)
from mlxstack.core.engine_snapshot import RequestPhase
from mlxstack.core.request import Request
from mlxstack.engine.decode.batch_row import ProposalSource
from mlxstack.engine.slots.answer_rule import AnswerRule
from mlxstack.policy.scheduling.scheduler_state import Slot, SlotState


class PhaseTimer:
    """Seconds of a request in each phase.

    It is in one phase at any time: all seconds together are those from `began` until it stops.
    """

    def __init__(self, began: float) -> None:
        self._phase = TTFTPhase.QUEUED
        self._since = began
        self._seconds = dict.fromkeys(TTFTPhase, 0.0)
        self.is_over = False

    def enter(self, phase: TTFTPhase, now: float) -> None:
        """Begin another phase, unless the timer was stopped."""
        if not self.is_over:
            self._seconds[self._phase] += max(0.0, now - self._since)
            self._since = max(now, self._since)
            self._phase = phase

    def stop(self, now: float) -> None:
        """End the last phase."""
        self.enter(self._phase, now)
        self.is_over = True

    def seconds(self, now: float) -> dict[TTFTPhase, float]:
        """Seconds of each phase until now, or until it was stopped."""
        self.enter(self._phase, now)
        return dict(self._seconds)


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
        self.is_assigned = False
        self.ended_step = -1
        self.assigned_at = request.arrived
        self.phases = PhaseTimer(request.arrived)
        self.running_at = 0.0
        self.first_at = 0.0
        self.saved_s = 0.0
        self.proposal_source: ProposalSource | None = None
        self.rule: AnswerRule | None = None

    @property
    def n_new(self) -> int:
        """Prompt tokens without reused KV."""
        return len(self.request.tokens) - self.n_cached

    @property
    def n_proposed(self) -> int:
        """Tokens that were proposed for its answer and verified."""
        return self.proposal_source.n_proposed if self.proposal_source else 0

    @property
    def n_accepted(self) -> int:
        """Proposed tokens that were accepted."""
        return self.proposal_source.n_accepted if self.proposal_source else 0

    def assign(self, slot: int) -> None:
        """Note the slot of the request, which is prepared from now on."""
        self.slot, self.assigned_at = slot, time.monotonic()
        self.state = RequestPhase.PREFILLING
        self.phases.enter(TTFTPhase.RESTORE, self.assigned_at)

    def assigned(self, expected_s: float) -> SlotAssigned:
        """Event of its prepared slot; the rest of the prompt takes `expected_s`."""
        assert self.slot is not None
        return SlotAssigned(
            request=self.request.id,
            slot=self.slot,
            n_prompt=len(self.request.tokens),
            n_cached=self.n_cached,
            source=self.source,
            miss=self.miss,
            expected_s=expected_s,
            saved_s=self.saved_s,
        )

    def choose(self, token: int, now: float, n_ctx: int) -> FinishReason | None:
        """Count a sampled token; the finish reason if it was the last.

        `n_ctx` tokens fit the slot, prompt and answer together.
        """
        if self.n_generated == 0:
            self.first_at = now
            self.phases.stop(now)
        self.n_generated += 1
        if token in self.request.eos:
            return FinishReason.EOS
        if self.n_generated >= self.request.max_tokens:
            return FinishReason.LENGTH
        if len(self.request.tokens) + self.n_generated >= n_ctx:
            return FinishReason.CONTEXT
        if self.rule is not None and self.rule.observe(token):
            return FinishReason.LOOP
        return None

    def finish(self, reason: FinishReason, now: float) -> RequestFinished:
        """The request's last event."""
        return RequestFinished(self.request.id, reason, self.work(now))

    def work(self, now: float) -> RequestTimings:
        """Timings of the request until now."""
        phases = self.phases.seconds(now)
        return RequestTimings(
            n_prompt=len(self.request.tokens),
            n_cached=self.n_cached,
            n_generated=self.n_generated,
            decode_s=max(0.0, now - self.running_at) if self.running_at else 0.0,
            ttft_s=sum(phases.values()) if self.first_at else 0.0,
            saved_s=self.saved_s,
            n_drafted=self.n_proposed,
            n_accepted=self.n_accepted,
            n_image=sum(image.end - image.start for image in self.request.images),
            loops=tuple(self.rule.stops) if self.rule else (),
            **phases,
        )


class PhaseClocks:
    """Times the phases of all requests without a token. MLX thread only.

    `awaiting` are queued requests that wait for a prefix of another prompt.
    """

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self.awaiting: Collection[str] = ()

    def note(
        self, slots: Sequence[Slot], computing: Collection[int] = (), *, is_decoding: bool = False
    ) -> None:
        """Note the work from now on: prompts of the slots `computing`, or decode."""
        now = time.monotonic()
        for request_state in self._requests.values():
            if request_state.phases.is_over:
                continue
            if request_state.slot is None:
                is_awaiting = request_state.request.id in self.awaiting
                phase = TTFTPhase.OTHER_PROMPTS if is_awaiting else TTFTPhase.QUEUED
            else:
                state = slots[request_state.slot].state
                is_passed = bool(computing) and request_state.slot not in computing
                phase = _phase(state, is_decoding, is_passed=is_passed)
            request_state.phases.enter(phase, now)


def _phase(state: SlotState, is_decoding: bool, is_passed: bool) -> TTFTPhase:
    """Phase in a slot; `is_passed`: another prompt is computed."""
    if state is SlotState.LOADING:
        return TTFTPhase.RESTORE
    if is_passed:
        return TTFTPhase.OTHER_PROMPTS
    if state is SlotState.RUNNING:
        return TTFTPhase.FIRST_TOKEN
    if is_decoding:
        return TTFTPhase.OTHER_ANSWERS
    return TTFTPhase.PREFILL
