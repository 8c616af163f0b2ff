"""A preset: which model, how many slots, how much context, which cache budget, which port.

Strict: unknown keys and impossible values are refused where the file is read.
"""

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Percent = Annotated[float, Meta(gt=0, le=90)]


PARKING_S = 10.0
"""Seconds after the drain in which an engine ends its step and parks the KV of its agents."""


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of every preset section."""


class ServiceKind(StrEnum):
    """What a service is for."""

    CHAT = "chat"
    EMBEDDING = "embedding"


class EvictionPolicy(StrEnum):
    """Which parked segment goes first."""

    LRU = "lru"
    LRU_FREQUENCY = "lru_frequency"


class ModelSpec(Strict, frozen=True):
    """`id` is "demo", a folder, or a hub id; `revision` and `adapter` (a folder) are optional.

    `draft` would be a second model that guesses tokens ahead. It is known only to be refused.
    """

    id: str
    revision: str | None = None
    adapter: str | None = None
    draft: str | None = None
    alias: str | None = None
    trust_remote_code: bool = False


class SlotSpec(Strict, frozen=True):
    """`n_ctx` is tokens per slot; `save_path` is where slot files go (default: under the home)."""

    count: Annotated[int, Meta(ge=1, le=256)] = 3
    n_ctx: Annotated[int, Meta(ge=64)] = 8192
    save_path: str | None = None


class KVSpec(Strict, frozen=True):
    """`bits` 16 keeps the model's own precision; `quantized_start` is a token position.

    `swa_full` would keep sliding windows whole, as llama-server's `--swa-full` does. It is known
    only to be refused with its price: windows are always capped here.
    """

    bits: Annotated[int, Meta(ge=4, le=16)] = 16
    group_size: Annotated[int, Meta(ge=32, le=128)] = 64
    quantized_start: NonNegativeInt = 0
    swa_full: bool = False


class BatchSpec(Strict, frozen=True):
    """`enabled: false` decodes one slot at a time."""

    enabled: bool = True
    max_size: PositiveInt = 8


class PrefillSpec(Strict, frozen=True):
    """`max_stall_ms` bounds the silence of a decoding agent while others prefill."""

    max_stall_ms: Annotated[float, Meta(ge=10)] = 250.0
    chunk_size: Annotated[int, Meta(ge=16)] = 2048


class QueueSpec(Strict, frozen=True):
    """`max_waiting` asks wait at most; a request may take `timeout_s` in all."""

    max_waiting: NonNegativeInt = 64
    timeout_s: Seconds = 3600.0
    aging_per_s: Annotated[float, Meta(ge=0)] = 0.1


class WarmPrefix(Strict, frozen=True):
    """A prefix to compute at start and pin by name; exactly one of the files is given."""

    name: str
    tokens_file: str | None = None
    text_file: str | None = None
    messages_file: str | None = None


class DiskSpec(Strict, frozen=True):
    """`max_bytes` of stored KV, and `max_age_s` seconds since last use; None is no bound."""

    enabled: bool = True
    max_bytes: PositiveInt | None = None
    max_age_s: Seconds | None = None


class MetricsSpec(Strict, frozen=True):
    """A summary line every `log_interval` seconds."""

    enabled: bool = True
    log_interval: Seconds = 300.0


class PrefixCacheSpec(Strict, frozen=True):
    """The KV memory beside the live slots."""

    enabled: bool = True
    memory_budget_pct: Percent = 20.0
    block_size: Annotated[int, Meta(ge=16, le=2048)] = 128
    eviction_policy: EvictionPolicy = EvictionPolicy.LRU_FREQUENCY
    max_entries: PositiveInt = 1000
    warm_on_startup: bool = False
    warm_prefixes: tuple[WarmPrefix, ...] = ()
    disk: DiskSpec = field(default_factory=DiskSpec)
    metrics: MetricsSpec = field(default_factory=MetricsSpec)


class Persist(StrEnum):
    """When an explicit agent's KV goes to disk."""

    AFTER_TURN = "after_turn"
    ON_PARK = "on_park"
    NEVER = "never"


class AgentsSpec(Strict, frozen=True):
    """`persist: after_turn` writes what a turn added, so that even a crash loses nothing."""

    persist: Persist = Persist.AFTER_TURN


class SamplingSpec(Strict, frozen=True):
    """Defaults for requests that say nothing; None falls to the model's generation_config.

    `max_tokens` -1 is no limit but the context, as in llama-server.
    """

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: NonNegativeInt | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    thinking: bool | None = None


class Tier(StrEnum):
    """How urgent the requests of a key are."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class ApiKey(Strict, frozen=True):
    """What a key gives its holder.

    `key` is the key itself or, so that no file holds it, "sha256:" and its digest in hex. `salt`
    keeps the holder's KV apart from everybody else's. `agents` are the explicit agents that he
    may speak as, "*" standing for any characters; none given are all.
    """

    key: str
    tier: Tier = Tier.NORMAL
    salt: str = ""
    agents: tuple[str, ...] = ()


class ServerSpec(Strict, frozen=True):
    """Where the service listens, and its bounds.

    Of `api_keys` one is needed if there are any; a bare text is a key of normal tier. Other
    machines are let in without a key only where `allow_unauthenticated` says so.

    `allowed_hosts` are names beside loopback and IP addresses by which it may be called; "*" any.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 7109
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str | ApiKey, ...] = ()
    allow_unauthenticated: bool = False
    strict_models: bool = False
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    startup_timeout_s: Seconds = 240.0
    drain_s: Annotated[float, Meta(gt=0, le=86_400)] = 6.0
    prevent_sleep: bool = True


class Speculation(StrEnum):
    """Whether rows bring draft tokens to a decode step."""

    AUTO = "auto"
    OFF = "off"


class Preset(Strict, frozen=True):
    """One service. `description` is the line that `mlx-stack presets` shows."""

    model: ModelSpec
    name: str = ""
    description: str = ""
    kind: ServiceKind = ServiceKind.CHAT
    slots: SlotSpec = field(default_factory=SlotSpec)
    kv: KVSpec = field(default_factory=KVSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    speculation: Speculation = Speculation.OFF
    prefill: PrefillSpec = field(default_factory=PrefillSpec)
    queue: QueueSpec = field(default_factory=QueueSpec)
    prefix_cache: PrefixCacheSpec = field(default_factory=PrefixCacheSpec)
    agents: AgentsSpec = field(default_factory=AgentsSpec)
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    template: dict[str, Any] = field(default_factory=dict)
