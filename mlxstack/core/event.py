"""What the engine tells the service about an ask, in the order in which it happens."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.errors import StackError


class Source(StrEnum):
    """Where the reused KV came from, nearest first."""

    NONE = "none"
    SLOT = "slot"
    FORK = "fork"
    PARKED = "parked"
    DISK = "disk"


class FinishReason(StrEnum):
    """Why a generation ended. Text-level stops are found by the service, not here."""

    EOS = "eos"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"


class Work(Struct, frozen=True):
    """What an ask cost. Times in seconds; cached + computed = prompt tokens."""

    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    saved_s: float = 0.0


class Miss(Struct, frozen=True):
    """Why less was reused than could have been.

    `at` is the token where the prompt diverged; `instead` are the tokens with which the prompt
    that it was compared to goes on.
    """

    reason: str
    at: int | None = None
    instead: tuple[int, ...] = ()


class Queued(Struct, frozen=True):
    """The ask was accepted; `position` 0 is the next one to be seated."""

    ask: str
    position: int


class Seated(Struct, frozen=True):
    """The ask has a slot, and `n_cached` of its prompt tokens need not be computed."""

    ask: str
    slot: int
    n_cached: int
    source: Source = Source.NONE
    miss: Miss | None = None


class Progress(Struct, frozen=True):
    """`n_done` of `n_prompt` prompt tokens are in the KV cache, reused ones included."""

    ask: str
    n_done: int
    n_prompt: int


class Chosen(Struct, frozen=True):
    """One sampled token. `logprob` and `top` (token, logprob) only when asked for."""

    ask: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Finished(Struct, frozen=True):
    """The last event of an ask that went well, or was cancelled."""

    ask: str
    reason: FinishReason
    work: Work


class Failed(Struct, frozen=True):
    """The last event of an ask that was refused or broke."""

    ask: str
    error: StackError


Event = Queued | Seated | Progress | Chosen | Finished | Failed
