"""Immutable state of the engine at one instant, readable on any thread."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.exact_rows import ExactRows
from mlxstack.core.request import Priority, TurnKind


class RequestPhase(StrEnum):
    """Phase of a request: WAITING, PREFILLING, RUNNING, then COMPLETED or CANCELLED."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class SlotView(Struct, frozen=True):
    """Slot with its request."""

    id: int
    n_ctx: int
    state: RequestPhase | None = None
    request: str | None = None
    agent: str | None = None
    n_tokens: int = 0
    """Tokens of its context."""
    n_prompt: int = 0
    n_done: int = 0
    n_cached: int = 0
    n_decoded: int = 0
    n_remain: int = 0
    tps: float = 0.0
    n_bytes: int = 0
    """Bytes without a prefix that it shares."""
    idle_s: float = 0.0
    """Seconds since the last use."""
    is_used: bool = False
    miss: CacheMiss | None = None
    elapsed_s: float = 0.0
    """Seconds since the arrival of the active request."""
    source: KVSource = KVSource.NONE
    """Where its reused KV came from."""
    n_early: int = 0
    """Tokens of the next turn that are begun early while the slot is idle."""
    n_early_left: int = 0
    """Tokens of the next turn that are to come."""
    n_drafted: int = 0
    n_accepted: int = 0
    """Draft tokens among the decoded ones."""
    priority: Priority = Priority.NORMAL
    turn_kind: TurnKind = TurnKind.PERSON
    """Of its last request, as is the priority."""
    is_reading: bool = False
    """Whether KV of its prompt is read from disk."""
    n_images: int = 0
    n_images_computed: int = 0
    """Images of the prompt that had no KV."""


class WaitingView(Struct, frozen=True):
    """One request in the queue."""

    request: str
    agent: str | None
    priority: Priority
    n_prompt: int
    waited_s: float
    pin: int | None = None
    turn_kind: TurnKind = TurnKind.PERSON


class Counters(Struct, frozen=True):
    """Totals since the engine started; tokens, seconds, calls.

    The drafted and accepted tokens include those of the draft model.

    Records and bytes are those that rank 0 sent to the other ranks.

    Image tokens are those in prefill chunks, as prompt tokens are.

    Early tokens are of turns begun early; they are no prompt tokens of a request.

    Warm passes kept the weights of an idle GPU in its memory; they are no model calls of requests.
    """

    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    prompt_s: float = 0.0
    n_generated_tokens: int = 0
    decode_s: float = 0.0
    n_model_calls: int = 0
    n_decode_calls: int = 0
    n_decode_rows: int = 0
    n_drafts: int = 0
    n_drafted_tokens: int = 0
    n_accepted_tokens: int = 0
    n_model_drafted_tokens: int = 0
    n_model_accepted_tokens: int = 0
    n_requests: int = 0
    n_completed: int = 0
    n_cancelled: int = 0
    n_failed: int = 0
    n_refused: int = 0
    n_tokens_max: int = 0
    n_evicted: int = 0
    n_image_encodes: int = 0
    n_image_tokens: int = 0
    n_early_tokens: int = 0
    n_early_used: int = 0
    n_early_wasted: int = 0
    n_warm_passes: int = 0
    n_rank_records: int = 0
    n_rank_bytes: int = 0

    def plus(self, more: "Counters") -> "Counters":
        """The totals of both; of `n_tokens_max` the larger one."""
        names = self.__struct_fields__
        sums = {name: getattr(self, name) + getattr(more, name) for name in names}
        return Counters(**{**sums, "n_tokens_max": max(self.n_tokens_max, more.n_tokens_max)})


class Snapshot(Struct, frozen=True):
    """State of the engine between two steps, at `at` monotonic seconds.

    MLX holds `active_bytes` in arrays, and `cache_bytes` of freed buffers for the next ones.
    `kv_bytes` are those of the slots, `kv_budget_bytes` bounds live and parked KV together.
    `is_drafting`: rows may bring draft tokens to a step, of the draft model too, where one is
    loaded.
    """

    at: float = 0.0
    slots: tuple[SlotView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()
    counters: Counters = Counters()
    active_bytes: int = 0
    cache_bytes: int = 0
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    is_batching: bool = True
    why_not_batching: str | None = None
    is_drafting: bool = False
    draft_model: str | None = None
    exact: ExactRows = ExactRows()
    """Bits of rows alone and beside others."""
