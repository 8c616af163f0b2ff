"""Status of a running service at an instant; all fields have defaults.

A section that is None is not reported by this service. Fields that a reader does not know are
ignored, so that older dashboards follow newer services. No field holds a whole prompt.
"""

from msgspec import Struct

from mlxstack.core.engine_events import KVSource
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.loops import LoopStop, RepeatedCall
from mlxstack.core.request import Priority, TurnKind
from mlxstack.core.thinking import Effort, ThinkingBound
from mlxstack.core.usage import UsageSums


class ServiceFacts(Struct, frozen=True):
    """Facts of a service."""

    model: str = ""
    architecture: str = ""
    preset: str = ""
    mode: str = ""
    version: str = ""
    health: str = ""
    """"loading", "ok", "stalled", "broken", "swapping" or "stopping"."""
    uptime_s: float = 0.0
    n_ctx: int = 0
    """Tokens per slot."""
    max_waiting: int = 0
    budget_bytes: int = 0
    """Bound of KV in memory; 0: unbounded."""


class MissView(Struct, frozen=True):
    """Cache miss of a request."""

    reason: str
    """As in `CacheMiss`."""
    at: int | None = None
    """Token at which the prompt diverged."""
    request: str = ""
    agent: str | None = None
    age_s: float = 0.0
    text_shared: str = ""
    """Text just before that token."""
    text_cached: str = ""
    """Text with which the cache goes on."""
    text_sent: str = ""
    """Text with which the prompt goes on."""
    n_lost: int = 0
    """Tokens that could have been reused."""
    lost_s: float = 0.0
    """Seconds to compute them."""


class MissSums(Struct, frozen=True):
    """Misses of one reason since the start: tokens and seconds lost."""

    reason: str
    n_misses: int = 0
    n_lost: int = 0
    lost_s: float = 0.0


class WindowSums(Struct, frozen=True):
    """Sums over the requests of one window."""

    n_requests: int = 0
    n_hits: int = 0
    """Requests that reused tokens."""
    n_prompt: int = 0
    n_cached: int = 0
    """Tokens of the prompts that were reused."""
    saved_s: float = 0.0
    """Seconds that they would have taken more without the cache."""
    ttft_s: float = 0.0
    """Seconds to their first tokens."""


class PrefixView(Struct, frozen=True):
    """Cached prefix."""

    id: str
    name: str = ""
    n_tokens: int = 0
    n_bytes: int = 0
    n_hits: int = 0
    age_s: float = 0.0
    agents: tuple[str, ...] = ()
    """Agents that share it."""
    places: tuple[str, ...] = ()
    """Places that hold all of it: "memory", "disk"."""
    is_pinned: bool = False
    opening: str = ""
    """Its first words, where they are known."""
    head: tuple[int, ...] = ()
    """Its first tokens, which the service turns into words."""


class DayWrites(Struct, frozen=True):
    """Bytes that a home's services wrote to disk on a day."""

    day: str
    """Local date, as 2026-11-29."""
    kv_bytes: int = 0
    """KV files and slot files."""
    n_bytes: int = 0
    """These, and the folders of agents."""


class DiskView(Struct, frozen=True):
    """Volume of the KV store, and what is written to it."""

    free_bytes: int = 0
    total_bytes: int = 0
    today: DayWrites = DayWrites("")
    days: tuple[DayWrites, ...] = ()
    """Days with writes, the latest first."""
    max_daily_bytes: int | None = None
    """Limit of KV a day; None: none."""
    trouble: str = ""
    """The reason why new KV is not written; empty while it is."""


class CacheView(Struct, frozen=True):
    """Prefix cache beside the live contexts, in bytes."""

    is_enabled: bool = True
    memory_bytes: int = 0
    memory_budget: int | None = None
    """None: unbounded."""
    disk_bytes: int = 0
    disk_budget: int | None = None
    """None: unbounded."""
    disk: DiskView | None = None
    n_entries: int = 0
    max_entries: int | None = None
    n_evicted: int = 0
    minute: WindowSums = WindowSums()
    hour: WindowSums = WindowSums()
    whole: WindowSums = WindowSums()
    prefixes: tuple[PrefixView, ...] = ()
    """The most useful first."""
    misses: tuple[MissView, ...] = ()
    """The latest first; of many, those that lost most."""
    losses: tuple[MissSums, ...] = ()
    """The most seconds first."""


class TurnView(Struct, frozen=True):
    """One request of an agent: its prompt is `n_cached` + `n_computed` tokens."""

    n_cached: int = 0
    n_computed: int = 0
    n_generated: int = 0
    ttft_s: float = 0.0
    age_s: float = 0.0
    reason: str | None = None


class AgentKVView(Struct, frozen=True):
    """KV of an agent for one model."""

    model: str
    n_tokens: int = 0
    n_bytes: int = 0
    place: str = ""
    """"live", "memory" or "disk"."""


class AgentView(Struct, frozen=True):
    """Agent with its latest turns."""

    id: str
    place: str = ""
    """"live", "parked" or "disk"."""
    slot: int | None = None
    """Its slot while it is live."""
    priority: Priority = Priority.NORMAL
    is_pinned: bool = False
    n_tokens: int = 0
    n_bytes: int = 0
    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    saved_s: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    """Draft tokens among the generated ones."""
    idle_s: float = 0.0
    miss: MissView | None = None
    states: tuple[AgentKVView, ...] = ()
    turns: tuple[TurnView, ...] = ()
    """The latest ones, oldest first."""
    name: str = ""
    """Its title."""
    thinking_budget: int | None = None
    """Maximum tokens of its thoughts; -1 has no maximum, None is not set."""
    effort: Effort | None = None
    max_context: int | None = None
    """Maximum tokens of its prompt and answer together."""


class RequestView(Struct, frozen=True):
    """Finished request; seconds are divided as in `RequestTimings`."""

    id: str
    agent: str | None = None
    slot: int | None = None
    source: KVSource = KVSource.NONE
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    saved_s: float = 0.0
    priority: Priority = Priority.NORMAL
    turn_kind: TurnKind = TurnKind.PERSON
    drops_kv: bool = False
    """Its KV went at its end."""
    ended: str = ""
    """Reason of its end: "eos", "length", "cancelled", "failed" ..."""
    age_s: float = 0.0
    miss: MissView | None = None
    n_drafted: int = 0
    n_accepted: int = 0
    """Draft tokens among the generated ones."""
    n_begun_early: int = 0
    """Tokens that were computed before it came."""
    n_used_early: int = 0
    """Tokens begun early that it used."""
    n_images: int = 0
    n_images_computed: int = 0
    """Images that had no KV."""
    thinking: ThinkingBound | None = None
    """Bound of its reasoning, where the model reasons."""
    others_s: float = 0.0
    restore_s: float = 0.0
    beside_s: float = 0.0
    first_s: float = 0.0
    loops: tuple[LoopStop, ...] = ()
    repeated_call: RepeatedCall | None = None


class ThroughputSample(Struct, frozen=True, array_like=True):
    """Token counts since the start, at `at` seconds since 1970."""

    at: float
    n_prompt: int
    n_generated: int
    n_cached: int = 0


class MemoryView(Struct, frozen=True):
    """Memory of the computer in bytes, and this service's share."""

    total_bytes: int = 0
    available_bytes: int = 0
    """Bytes that are free without swapping."""
    weights_bytes: int = 0
    live_bytes: int = 0
    parked_bytes: int = 0
    workspace_bytes: int = 0
    """Rest of the process: other arrays of MLX, freed buffers, the program itself."""
    swap_bytes: int = 0
    pressure: str = ""
    """"calm", "high" or "critical"."""


class LoadView(Struct, frozen=True):
    """Loading model."""

    model: str
    n_done: int = 0
    """Bytes of its weights in memory; while it is downloaded, bytes on disk."""
    n_total: int = 0
    """Bytes of its weights; while it is downloaded, those that were missing."""
    elapsed_s: float = 0.0
    is_download: bool = False


class HeadView(Struct, frozen=True):
    """System messages and tools of a client, computed before its first message."""

    client: str
    version: str = ""
    folder: str = ""
    state: str = "waiting"
    """"waiting", "ready" or "failed"."""
    n_tokens: int = 0
    n_cached: int = 0
    """Tokens that were in KV already, in memory or on disk."""
    seconds: float = 0.0
    """Seconds until it was ready."""


class StatusFrame(Struct, frozen=True, omit_defaults=True):
    """Status of a service at an instant."""

    at: float = 0.0
    """Seconds since 1970."""
    service: ServiceFacts = ServiceFacts()
    snapshot: Snapshot = Snapshot()
    snapshot_age_s: float = 0.0
    """Seconds from the snapshot to this status."""
    cache: CacheView | None = None
    agents: tuple[AgentView, ...] | None = None
    """The last used first."""
    requests: tuple[RequestView, ...] | None = None
    """The last finished first."""
    n_agents: int = 0
    """Agents, of which only the last used ones are included; 0: not counted."""
    past: tuple[ThroughputSample, ...] = ()
    """Last minutes, the oldest first; only in the first frame of a feed."""
    memory: MemoryView | None = None
    loading: LoadView | None = None
    today: UsageSums | None = None
    """Requests of all services of the home since midnight."""
    client_heads: tuple[HeadView, ...] = ()
    titles: dict[str, str] = {}
    """Names of agents by client and folder, or by their first message."""
