"""Frozen structs of a service's responses; unused keys are ignored."""

from typing import Any

from msgspec import Struct

from mlxstack.core.loops import LoopStop


class HealthResponse(Struct, frozen=True):
    """Health: `is_ready` is HTTP 200, otherwise `message` has the reason."""

    is_ready: bool
    message: str


class GenerationSettings(Struct, frozen=True):
    """`n_ctx` is tokens per slot."""

    n_ctx: int


class PropsResponse(Struct, frozen=True):
    """Subset of GET /props for our own clients."""

    total_slots: int
    default_generation_settings: GenerationSettings
    model_alias: str = ""
    model_path: str = ""
    why_not_batching: str | None = None
    """Reason why running slots do not share a forward pass."""
    draft_model: str | None = None
    prevents_sleep: bool = False
    why_not_preventing_sleep: str | None = None
    warm_passes: int = 0
    """Passes that kept the weights of an idle GPU warm."""
    peer_troubles: tuple[str, ...] = ()
    mlx_active_bytes: int = 0
    """Arrays of MLX."""
    mlx_cache_bytes: int = 0
    """Freed buffers that MLX keeps."""
    kv_budget_bytes: int = 0
    template_notes: tuple[str, ...] = ()
    """Limits of the chat template, as in `mlx-stack template`; none for a base model."""
    is_sleeping: bool = False
    is_base_model: bool = False
    n_ctx_train: int = 0
    modalities: dict[str, bool] = {}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Conditions that an operator should know, as sentences."""
        notes = []
        if self.is_sleeping:
            notes.append("unloaded while idle")
        if self.why_not_batching:
            notes.append(f"decoding slot by slot: {self.why_not_batching}")
        if self.draft_model:
            notes.append(f"drafting with {self.draft_model}")
        if self.prevents_sleep:
            notes.append("prevents idle sleep")
        if self.why_not_preventing_sleep:
            notes.append(f"does not prevent idle sleep: {self.why_not_preventing_sleep}")
        if self.warm_passes:
            notes.append(f"weights kept warm in pauses, by {self.warm_passes} passes")
        notes.extend(f"peer {trouble}" for trouble in self.peer_troubles)
        return tuple(notes)


class NextToken(Struct, frozen=True):
    """Progress of the running generation of a slot."""

    n_decoded: int = 0
    n_remain: int = 0


class SlotResponse(Struct, frozen=True):
    """One element of GET /slots: llama-server's keys and ours."""

    id: int
    n_ctx: int
    is_processing: bool
    state: str | None = None
    agent: str | None = None
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    n_prompt_tokens_processed: int = 0
    cached_tokens: int = 0
    tps: float = 0.0
    idle_s: float = 0.0
    miss_reason: str | None = None
    next_token: tuple[NextToken, ...] = ()


class CallUsage(Struct, frozen=True):
    """Tokens of one call; `cached_tokens` of the prompt were not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] = {}
    loops: tuple[LoopStop, ...] = ()
    """Repetitions that were ended."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused."""
        return int(self.prompt_tokens_details.get("cached_tokens") or 0)


class ClientMessage(Struct, frozen=True):
    """Piece of a message that a stream brings."""

    content: str | None = None
    reasoning_content: str | None = None


class ClientChoice(Struct, frozen=True):
    """`delta` of chats, `text` of completions."""

    delta: ClientMessage = ClientMessage()
    text: str = ""
    finish_reason: str | None = None


class ChatResponse(Struct, frozen=True):
    """One chunk of a streamed completion."""

    choices: tuple[ClientChoice, ...] = ()
    usage: CallUsage | None = None
    timings: dict[str, float] | None = None


class ModelStatus(Struct, frozen=True):
    """`value` is "unloaded", "loading", "loaded" or "unloading"."""

    value: str


class ListedModel(Struct, frozen=True):
    """Model of /v1/models."""

    id: str
    status: ModelStatus | None = None
    """Of a gateway only, like the fields that follow."""
    max_input_tokens: int = 0
    """Tokens per slot."""
    n_bytes: int = 0
    """Memory that it may take."""
    fits: bool = True
    aliases: tuple[str, ...] = ()
    resident: str = ""
    n_requests: int = 0
    n_active: int = 0
    n_waiting: int = 0
    idle_s: float | None = None
    """Seconds since its last request ended; None before the first."""


class ListedModels(Struct, frozen=True):
    """Models of one address, as GET /v1/models lists them."""

    data: tuple[ListedModel, ...] = ()


class ServerSentEvent(Struct, frozen=True):
    """One server-sent event of a feed."""

    event: str
    data: bytes


class FeedLost(Struct, frozen=True):
    """The feed broke off."""

    reason: str
    retry_s: float
    """Seconds until the next try."""
    needs_key: bool = False
    """Whether the API key is missing or wrong."""
