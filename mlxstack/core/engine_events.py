"""Engine events of one request, in the order in which they happen."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.errors import StackError
from mlxstack.core.loops import LoopStop


class KVSource(StrEnum):
    """Source of the reused KV, nearest first."""

    NONE = "none"
    SLOT = "slot"
    FORK = "fork"
    PARKED = "parked"
    DISK = "disk"


class FinishReason(StrEnum):
    """Reason why a generation ended; WORD is a stop string, which the service detects."""

    EOS = "eos"
    WORD = "word"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    LOOP = "loop"
    """The answer repeated itself."""


class TTFTPhase(StrEnum):
    """Phase until the first token: the field of its seconds in `RequestTimings`."""

    QUEUED = "queued_s"
    OTHER_PROMPTS = "others_s"
    RESTORE = "restore_s"
    PREFILL = "prefill_s"
    OTHER_ANSWERS = "beside_s"
    FIRST_TOKEN = "first_s"


PHASE_NAMES = {
    TTFTPhase.QUEUED: "waited in the queue",
    TTFTPhase.OTHER_PROMPTS: "waited for other prompts",
    TTFTPhase.RESTORE: "read or copied KV",
    TTFTPhase.PREFILL: "computed the prompt",
    TTFTPhase.OTHER_ANSWERS: "waited for other answers",
    TTFTPhase.FIRST_TOKEN: "the first token",
}
"""Words of the phases for people, in their order."""


class RequestTimings(Struct, frozen=True):
    """Cost of a request in seconds; cached + computed = prompt tokens.

    The seconds of all phases add up to `ttft_s`: `queued_s` without a slot, `others_s` while other
    prompts were computed, `restore_s` while KV was read or copied, `prefill_s` for its own prompt,
    `beside_s` for decode steps of other requests between its chunks, and `first_s` from the
    computed prompt to the first token.

    Of `n_drafted` draft tokens `n_accepted` are among the generated ones; of the prompt tokens
    `n_image` are those of images.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    saved_s: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    n_image: int = 0
    others_s: float = 0.0
    restore_s: float = 0.0
    beside_s: float = 0.0
    first_s: float = 0.0
    loops: tuple[LoopStop, ...] = ()
    """Repetitions that were ended."""


class CacheMiss(Struct, frozen=True):
    """Reason why less was reused than possible, and the tokens lost.

    `at` is the token where the prompt diverged; `instead` are the tokens with which the prompt
    that it was compared to goes on. `n_lost` of the computed tokens could have been reused.
    """

    reason: str
    at: int | None = None
    instead: tuple[int, ...] = ()
    n_lost: int = 0


class EarlyUse(Struct, frozen=True):
    """Early-turn tokens: `n_begun` computed before the prompt, `n_used` reused."""

    n_begun: int
    n_used: int


class SlotAssigned(Struct, frozen=True):
    """Slot for the request; `n_cached` of its `n_prompt` tokens need no prefill.

    `early`: its agent's next turn was begun early, rightly or not. At the measured speed the
    prefill takes `expected_s`, and `saved_s` more without the cache; 0 before the first one.
    """

    request: str
    slot: int
    n_prompt: int
    n_cached: int
    source: KVSource = KVSource.NONE
    miss: CacheMiss | None = None
    early: EarlyUse | None = None
    expected_s: float = 0.0
    saved_s: float = 0.0


class PrefillProgress(Struct, frozen=True):
    """Prompt tokens in the KV cache so far, reused ones included."""

    request: str
    n_done: int
    n_prompt: int


class TokenSampled(Struct, frozen=True):
    """Sampled token; `logprob` and `top` (token, logprob) on request."""

    request: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class RequestFinished(Struct, frozen=True):
    """Last event of a request that completed or was cancelled."""

    request: str
    reason: FinishReason
    timings: RequestTimings


class RequestFailed(Struct, frozen=True):
    """Last event of a request that was refused or failed."""

    request: str
    error: StackError


Event = SlotAssigned | PrefillProgress | TokenSampled | RequestFinished | RequestFailed
