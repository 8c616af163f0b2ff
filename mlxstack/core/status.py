"""Status of a running service at an instant; all fields have defaults.

A section that is None is not reported by this service. Fields that a reader does not know are
ignored, so that older dashboards follow newer services. No field holds a whole prompt.
"""

from msgspec import Struct

from mlxstack.core.engine_events import KVSource
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.request import Priority


class ServiceFacts(Struct, frozen=True):
    """Service facts; `budget_bytes` bounds KV in memory, 0: unbounded.

    `health` is "loading", "ok", "stalled", "broken", "swapping" or "stopping". `n_ctx` is tokens
    per slot.
    """

    model: str = ""
    architecture: str = ""
    preset: str = ""
    mode: str = ""
    version: str = ""
    health: str = ""
    uptime_s: float = 0.0
    n_ctx: int = 0
    max_waiting: int = 0
    budget_bytes: int = 0


class MissView(Struct, frozen=True):
    """Cache miss of a request; `reason` as in `CacheMiss`.

    `at` is the token where the prompt diverged: `text_shared` comes just before it,
    `text_cached` is what the cache goes on with, `text_sent` what the prompt goes on with.
    It cost `n_lost` tokens that could have been reused, and `lost_s` seconds to compute them.
    """

    reason: str
    at: int | None = None
    request: str = ""
    agent: str | None = None
    age_s: float = 0.0
    text_shared: str = ""
    text_cached: str = ""
    text_sent: str = ""
    n_lost: int = 0
    lost_s: float = 0.0


class MissSums(Struct, frozen=True):
    """Misses of one reason since the start: tokens and seconds lost."""

    reason: str
    n_misses: int = 0
    n_lost: int = 0
    lost_s: float = 0.0


class WindowSums(Struct, frozen=True):
    """Sums over the requests of one window.

    `n_cached` of `n_prompt` tokens were reused in `n_hits` requests. They took `ttft_s` seconds to
    their first tokens, and `saved_s` more without the cache.
    """

    n_requests: int = 0
    n_hits: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    saved_s: float = 0.0
    ttft_s: float = 0.0


class PrefixView(Struct, frozen=True):
    """Cached prefix; `agents` share it, `places` hold all of it.

    A place is "memory" or "disk". `opening` are its first words, where they are known; `head` are
    the first tokens of it, which the service turns into words.
    """

    id: str
    name: str = ""
    n_tokens: int = 0
    n_bytes: int = 0
    n_hits: int = 0
    age_s: float = 0.0
    agents: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    is_pinned: bool = False
    opening: str = ""
    head: tuple[int, ...] = ()


class CacheView(Struct, frozen=True):
    """Prefix cache beside the live contexts, in bytes; budget None: unbounded.

    `prefixes` come with the most useful first, `misses` with the latest first (of many, those that
    lost most), `losses` with the most seconds first.
    """

    is_enabled: bool = True
    memory_bytes: int = 0
    memory_budget: int | None = None
    disk_bytes: int = 0
    disk_budget: int | None = None
    n_entries: int = 0
    max_entries: int | None = None
    n_evicted: int = 0
    minute: WindowSums = WindowSums()
    hour: WindowSums = WindowSums()
    whole: WindowSums = WindowSums()
    prefixes: tuple[PrefixView, ...] = ()
    misses: tuple[MissView, ...] = ()
    losses: tuple[MissSums, ...] = ()


class TurnView(Struct, frozen=True):
    """One request of an agent: its prompt is `n_cached` + `n_computed` tokens."""

    n_cached: int = 0
    n_computed: int = 0
    n_generated: int = 0
    ttft_s: float = 0.0
    age_s: float = 0.0
    reason: str | None = None


class AgentKVView(Struct, frozen=True):
    """KV of an agent for one model; `place`: "live", "memory" or "disk"."""

    model: str
    n_tokens: int = 0
    n_bytes: int = 0
    place: str = ""


class AgentView(Struct, frozen=True):
    """Agent with its title `name`; `place` is "live", "parked" or "disk".

    It has a `slot` only when live. `turns` are the latest ones, oldest first. Of `n_drafted` draft
    tokens `n_accepted` are among the generated ones.
    """

    id: str
    place: str = ""
    slot: int | None = None
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
    idle_s: float = 0.0
    miss: MissView | None = None
    states: tuple[AgentKVView, ...] = ()
    turns: tuple[TurnView, ...] = ()
    name: str = ""


class RequestView(Struct, frozen=True):
    """A finished request; `ended` is the reason: "eos", "length", "cancelled", "failed" ...

    The seconds until its first token are divided as in `RequestTimings`.
    Of `n_drafted` draft tokens `n_accepted` are among the generated ones.
    `n_begun_early` tokens were computed before it came, of which it used `n_used_early`. Of
    `n_images` images `n_images_computed` had no KV.
    """

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
    ended: str = ""
    age_s: float = 0.0
    miss: MissView | None = None
    n_drafted: int = 0
    n_accepted: int = 0
    n_begun_early: int = 0
    n_used_early: int = 0
    n_images: int = 0
    n_images_computed: int = 0
    others_s: float = 0.0
    restore_s: float = 0.0
    beside_s: float = 0.0
    first_s: float = 0.0


class ThroughputSample(Struct, frozen=True, array_like=True):
    """Token counts since the start, at `at` seconds since 1970."""

    at: float
    n_prompt: int
    n_generated: int
    n_cached: int = 0


class MemoryView(Struct, frozen=True):
    """Memory of the computer in bytes, and this service's share.

    `workspace_bytes` are the rest of the process: arrays of MLX that are neither weights nor KV,
    freed buffers that it keeps, the program itself. `available_bytes` are free without swapping.
    `pressure` is "calm", "high" or "critical".
    """

    total_bytes: int = 0
    available_bytes: int = 0
    weights_bytes: int = 0
    live_bytes: int = 0
    parked_bytes: int = 0
    workspace_bytes: int = 0
    swap_bytes: int = 0
    pressure: str = ""


class LoadView(Struct, frozen=True):
    """Loading model: bytes of its weights in memory, after `elapsed_s`.

    While it is downloaded, they are bytes on disk of all that were missing.
    """

    model: str
    n_done: int = 0
    n_total: int = 0
    elapsed_s: float = 0.0
    is_download: bool = False


class StatusFrame(Struct, frozen=True, omit_defaults=True):
    """Status at `at`, seconds since 1970; the snapshot was taken `snapshot_age_s` earlier.

    `titles` names agents by client and folder, or by what they were first told.
    `agents` come with the last used first, `requests` with the last finished first. Of `n_agents`
    only the last used ones are included; 0 when agents are not counted. `past` are the last
    minutes, the oldest first: only the first frame of a feed has it.
    """

    at: float = 0.0
    service: ServiceFacts = ServiceFacts()
    snapshot: Snapshot = Snapshot()
    snapshot_age_s: float = 0.0
    cache: CacheView | None = None
    agents: tuple[AgentView, ...] | None = None
    requests: tuple[RequestView, ...] | None = None
    n_agents: int = 0
    past: tuple[ThroughputSample, ...] = ()
    memory: MemoryView | None = None
    loading: LoadView | None = None
    titles: dict[str, str] = {}
