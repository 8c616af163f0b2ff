"""Preset of a service: model, slots, context, cache budgets, server.

Strict: unknown keys and impossible values are refused where the file is read.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from mlxstack.core.exact_rows import ExactBits
from mlxstack.core.loops import LoopStops, StopLoops
from mlxstack.core.strict import Strict
from mlxstack.core.thinking import ClientSpec, ThinkingSpec

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Percent = Annotated[float, Meta(gt=0, le=90)]

AUTO: Literal["auto"] = "auto"
"""All memory that weights, compute buffers and system reserve leave."""


PARKING_S = 10.0
"""Seconds after the drain for the last step and parking."""


class ServiceKind(StrEnum):
    """Purpose of a service."""

    CHAT = "chat"
    EMBEDDING = "embedding"


class EvictionPolicy(StrEnum):
    """Eviction order of parked segments."""

    LRU = "lru"
    LRU_FREQUENCY = "lru_frequency"


class RopeType(StrEnum):
    """Scaling of rotary embeddings."""

    LINEAR = "linear"
    YARN = "yarn"


class RopeSpec(Strict, frozen=True):
    """Scaling of the rotary embedding for longer contexts."""

    type: Annotated[RopeType, Meta(description="`yarn`, or `linear`.")]
    factor: Annotated[
        float,
        Meta(gt=1, le=64, description="Length of the context, divided by that of the training."),
    ]


class ModelSpec(Strict, frozen=True):
    """Model: `id`, `draft`, `mtp` are "demo", folders, or hub ids."""

    id: Annotated[
        str,
        Meta(
            description="`demo` for the embedded model, a folder (`./x`, `/x`, `~/x`), or a "
            "hub id; `model: ID` alone is the same."
        ),
    ]
    revision: Annotated[
        str | None,
        Meta(description="Branch, tag or commit of the hub's repository; null is its newest."),
    ] = None
    adapter: Annotated[str | None, Meta(description="Folder of a LoRA adapter for the model.")] = (
        None
    )
    draft: Annotated[
        str | None,
        Meta(
            description="A small model with the same vocabulary, or a DFlash, DFlash2 or EAGLE-3 "
            "drafter of this one, as `id`; needs `speculation: auto`. The output is the same."
        ),
    ] = None
    mtp: Annotated[
        str | None,
        Meta(
            description="A checkpoint, as `id`, whose multi-token prediction head drafts for this "
            "model: the one that it was converted from. Only its head is loaded; null is the "
            "model's own. Needs `speculation: auto`. The output is the same."
        ),
    ] = None
    alias: Annotated[
        str | None, Meta(description="Name of the model in the API; null is its id.")
    ] = None
    rope: Annotated[
        RopeSpec | None,
        Meta(
            description="Scaling of the rotary embedding for longer contexts; short ones lose a "
            "little quality. Refused where mlx-lm has none for the architecture."
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Meta(description="Run Python code from the model's folder; only for sources you trust."),
    ] = False

    @property
    def plain_id(self) -> str:
        """Hub id as it is, a folder by its last name."""
        is_folder = self.id.startswith(("/", "./", "../", "~"))
        if is_folder:
            return self.id.rstrip("/").rpartition("/")[2]
        return self.id

    @property
    def served_name(self) -> str:
        """Name in the API: the alias, or the id."""
        return self.alias or self.plain_id


def scaled_context(n_trained: int, model: ModelSpec) -> int:
    """Context length in tokens: the trained one, scaled."""
    return int(n_trained * (model.rope.factor if model.rope is not None else 1))


class SlotSpec(Strict, frozen=True):
    """Slots: `n_ctx` tokens each; slot files go to `save_path`.

    By default that is under the home.
    """

    count: Annotated[
        Annotated[int, Meta(ge=1, le=256)],
        Meta(description="Number of slots; each holds the live KV cache of one request."),
    ] = 3
    n_ctx: Annotated[
        Annotated[int, Meta(ge=64)],
        Meta(
            description="Context per slot in tokens, prompt and response together; `64k` is 65536."
        ),
    ] = 8192
    save_path: Annotated[
        str | None, Meta(description="Folder for slot files; null is a folder of the home.")
    ] = None


class KVSpec(Strict, frozen=True):
    """`bits` 16 keeps the model's own precision; `quantized_start` is a token position."""

    bits: Annotated[
        Literal[4, 8, 16],
        Meta(description="16 keeps the model's own precision; 8 and 4 quantize KV."),
    ] = 16
    group_size: Annotated[
        Literal[32, 64, 128], Meta(description="Number of values that share a scale.")
    ] = 64
    quantized_start: Annotated[
        NonNegativeInt, Meta(description="First quantized token position.")
    ] = 0


class BatchSpec(Strict, frozen=True):
    """`enabled: false` decodes one slot at a time."""

    enabled: Annotated[
        bool, Meta(description="false decodes one slot at a time; requests still take turns.")
    ] = True
    max_size: Annotated[
        PositiveInt,
        Meta(description="Maximum number of requests decoded together; further ones wait."),
    ] = 8
    exact: Annotated[
        ExactBits,
        Meta(
            description="Equal bits of a row alone and beside others: `auto` where they cost at "
            "most 5 % of decode and of prefill, `on` at any cost, or `off`."
        ),
    ] = ExactBits.AUTO


class PrefillSpec(Strict, frozen=True):
    """`max_stall_ms` bounds the pause of decoding requests during a prefill."""

    max_stall_ms: Annotated[
        Annotated[float, Meta(ge=10)],
        Meta(description="Longest pause in ms of an answer for a person while others prefill."),
    ] = 250.0
    chunk_size: Annotated[
        Annotated[int, Meta(ge=16)],
        Meta(description="Maximum number of prompt tokens per prefill chunk."),
    ] = 2048


class QueueSpec(Strict, frozen=True):
    """At most `max_waiting` requests queue; a request times out after `timeout_s`."""

    max_waiting: Annotated[
        NonNegativeInt,
        Meta(description="Maximum queue length; further requests get 503 with Retry-After."),
    ] = 64
    timeout_s: Annotated[Seconds, Meta(description="Seconds after which a request times out.")] = (
        3600.0
    )
    aging_per_s: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(description="Priority added to a waiting request per second; tiers are 1 apart."),
    ] = 0.1


class WarmPrefix(Strict, frozen=True):
    """Prefix to compute at start and pin; exactly one file is given."""

    name: Annotated[str, Meta(description="The name by which the prefix is pinned.")]
    tokens_file: Annotated[str | None, Meta(description="A JSON list of token ids.")] = None
    text_file: Annotated[str | None, Meta(description="Plain text.")] = None
    messages_file: Annotated[str | None, Meta(description="A JSON list of chat messages.")] = None


class DiskSpec(Strict, frozen=True):
    """Disk bounds: `max_bytes`, and `max_age_s` since last use; None: unbounded."""

    enabled: Annotated[bool, Meta(description="Keep KV on disk too, beyond the process.")] = True
    max_bytes: Annotated[
        PositiveInt | Literal["auto"] | None,
        Meta(description="Maximum bytes of KV on disk; `auto`: 10 % of the volume stay free."),
    ] = AUTO
    daily_write_bytes: Annotated[
        PositiveInt | None, Meta(description="Maximum bytes of KV that are written to disk a day.")
    ] = None
    max_age_s: Annotated[
        Seconds | None, Meta(description="Seconds since its last use after which KV is deleted.")
    ] = None


class MetricsSpec(Strict, frozen=True):
    """Metrics endpoint, and a log line every `log_interval` seconds."""

    enabled: Annotated[
        bool, Meta(description="Serve `/metrics`, and log a summary line periodically.")
    ] = True
    log_interval: Annotated[Seconds, Meta(description="Seconds between two summary lines.")] = 300.0


class Anticipation(StrEnum):
    """Early prefill of the expected next turns."""

    AUTO = "auto"
    OFF = "off"


class PrefixCacheSpec(Strict, frozen=True):
    """KV kept in memory for contexts that occupy no slot."""

    enabled: Annotated[
        bool, Meta(description="Keep KV after a slot is released, and share it between agents.")
    ] = True
    memory_budget_pct: Annotated[
        Percent | Literal["auto"],
        Meta(
            description="Percent of the memory for KV, live slots included; `auto` is the "
            "remainder after weights, compute buffers and the system's reserve."
        ),
    ] = AUTO
    block_size: Annotated[
        Annotated[int, Meta(ge=16, le=2048)],
        Meta(description="Block size in tokens, the unit of shared KV; a multiple of 16."),
    ] = 128
    eviction_policy: Annotated[
        EvictionPolicy,
        Meta(
            description="Evict the least recently used, or the least recently and least often used."
        ),
    ] = EvictionPolicy.LRU_FREQUENCY
    max_entries: Annotated[
        PositiveInt, Meta(description="Maximum number of KV segments in memory.")
    ] = 1000
    warm_on_startup: Annotated[
        bool,
        Meta(description="On startup, compute `warm_prefixes` and the learned shared prefixes."),
    ] = False
    warm_prefixes: Annotated[
        tuple[WarmPrefix, ...],
        Meta(description="Prefixes to compute and pin, each from exactly one file."),
    ] = ()
    anticipate: Annotated[
        Anticipation,
        Meta(
            description="`auto` computes the expected beginning of an agent's next prompt in the "
            "pause after an answer, on mains power and while nothing else waits; `off` does not."
        ),
    ] = Anticipation.AUTO
    disk: DiskSpec = field(default_factory=DiskSpec)
    metrics: MetricsSpec = field(default_factory=MetricsSpec)


class Persist(StrEnum):
    """Time of writing an explicit agent's KV to disk."""

    AFTER_TURN = "after_turn"
    ON_PARK = "on_park"
    NEVER = "never"


class AgentsSpec(Strict, frozen=True):
    """Persistence of agents; `after_turn` survives a crash."""

    persist: Annotated[
        Persist,
        Meta(description="Time of writing KV of explicit agents; `after_turn` survives a crash."),
    ] = Persist.AFTER_TURN


class SamplingSpec(ThinkingSpec, frozen=True):
    """Sampling of requests that set none; None takes the model's generation_config.json.

    Where neither sets a temperature, top_p, top_k or min_p, they are llama-server's defaults.
    `max_tokens` -1 is no limit but the context, as in llama-server.
    """

    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="0 always samples the most likely token."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Sample from the most likely tokens with this total probability."),
    ] = None
    top_k: Annotated[
        NonNegativeInt | None,
        Meta(description="Sample from this many most likely tokens; 0 is all."),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Sample from tokens with at least this fraction of the top probability."),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Values above 1 lower the probability of tokens that occurred before."),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Maximum tokens to generate; -1 is limited by the context only."),
    ] = None
    thinking: Annotated[
        bool | None,
        Meta(description="Whether reasoning models reason where a request does not say."),
    ] = None
    stop_loops: StopLoops = LoopStops.AUTO


class StructuredOutputSpec(Strict, frozen=True):
    """Grammars applied without a request field."""

    auto_tool_grammar: Annotated[
        bool,
        Meta(
            description="With tool_choice auto, constrain a tool call to its schema once its "
            "opening token is sampled; false leaves it to the model."
        ),
    ] = True


class Tier(StrEnum):
    """Urgency of the requests of a key."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class ApiKey(Strict, frozen=True):
    """API key with its tier, salt and agents.

    `key` is the key itself or, so that no file holds it, "sha256:" and its digest in hex. `salt`
    keeps the holder's KV apart from that of others. `agents` are the explicit agents that
    the key may act as, "*" matching any characters; without any, all. `models` are the names of
    the models that the key may use, in the same form.
    """

    key: Annotated[
        str, Meta(description="The key, or `sha256:` and its digest in hex (`mlx-stack key`).")
    ]
    tier: Annotated[Tier, Meta(description="Priority of the requests of this key.")] = Tier.NORMAL
    salt: Annotated[
        str, Meta(description="Keeps the KV of this key's holder apart from that of others.")
    ] = ""
    agents: Annotated[
        tuple[str, ...],
        Meta(description="Agents that it may act as and change; `*` matches any characters."),
    ] = ()
    models: Annotated[
        tuple[str, ...],
        Meta(description="Models that it may use, by name; `*` matches any characters."),
    ] = ()
    may_raise: Annotated[
        bool, Meta(description="Whether it may set a higher agent priority than its tier.")
    ] = False


class PeerSpec(Strict, frozen=True):
    """Peer that serves the same model.

    Without a `key_file` its key is in MLX_STACK_PEER_KEY.
    """

    url: Annotated[str, Meta(description="Its URL, such as `http://127.0.0.1:7119`.")]
    key_file: Annotated[
        str | None, Meta(description="File with its API key, if it requires one.")
    ] = None


class Residency(StrEnum):
    """Residency of a model behind a gateway."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class ServerSpec(Strict, frozen=True):
    """Address and bounds of the service.

    With `api_keys`, a request needs one of them; a string is a key of normal tier. Requests of
    other machines need a key unless `allow_unauthenticated` is set.

    `allowed_hosts` are accepted Host names beside loopback and IP addresses; "*" is any.
    """

    host: Annotated[
        str, Meta(description="Address to listen on; addresses beside loopback require keys.")
    ] = "127.0.0.1"
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        Meta(description="Port to listen on; 0 takes a free one."),
    ] = 7109
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="Accepted Host names beside loopback and IP addresses.")
    ] = ()
    api_keys: Annotated[
        tuple[str | ApiKey, ...],
        Meta(description="API keys, as strings or sections; if there are any, requests need one."),
    ] = ()
    allow_unauthenticated: Annotated[
        bool, Meta(description="Accept requests of other machines without a key.")
    ] = False
    strict_models: Annotated[
        bool | None,
        Meta(
            description="Refuse requests that name another model with 404, instead of serving "
            "them. null does so where several models are served."
        ),
    ] = None
    max_body_bytes: Annotated[
        PositiveInt, Meta(description="Maximum request body in bytes; larger ones get 413.")
    ] = 64 * 1024 * 1024
    max_bodies_bytes: Annotated[
        PositiveInt,
        Meta(
            description="Maximum bytes of all request bodies in flight; beyond it requests "
            "get 503 with Retry-After. One body of max_body_bytes always fits."
        ),
    ] = 256 * 1024 * 1024
    startup_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Seconds without progress (no new line in the log) after which a start or "
            "a swap counts as failed."
        ),
    ] = 240.0
    drain_s: Annotated[
        Annotated[float, Meta(gt=0, le=86_400)],
        Meta(description="Seconds that running requests may continue at a stop."),
    ] = 6.0
    idle_unload_s: Annotated[
        Seconds | None,
        Meta(
            description="Seconds without a request until the model leaves memory, its KV on disk; "
            "the next request loads it. null keeps it loaded."
        ),
    ] = None
    resident: Annotated[
        Residency,
        Meta(
            description="Behind a gateway: `always` loads it at the start and keeps it, `auto` "
            "loads it for a request and keeps it while there is room, `never` unloads it when idle."
        ),
    ] = Residency.AUTO
    peers: Annotated[
        tuple[str | PeerSpec, ...],
        Meta(
            description="Services that may compute prompts for this one, and take its agents: URLs "
            "or sections."
        ),
    ] = ()
    prevent_sleep: Annotated[
        bool,
        Meta(description="Keep a Mac from idle sleep while requests run; no effect elsewhere."),
    ] = True


class VisionSpec(Strict, frozen=True):
    """Images of a model that takes them."""

    max_pixels: Annotated[
        Annotated[int, Meta(ge=1024, le=40_000_000)],
        Meta(
            description="Maximum pixels of an image after scaling, also of one with the detail "
            "`original`; larger ones are scaled down."
        ),
    ] = 4 * 1024 * 1024


class Wired(StrEnum):
    """Memory that macOS may not page out."""

    OFF = "off"
    WEIGHTS = "weights"


class DeviceSpec(Strict, frozen=True):
    """GPU of this machine."""

    wired: Annotated[
        Wired,
        Meta(
            description="`weights` keeps the weights resident on Metal, for a model near the limit "
            "of the GPU's memory; `off` wires nothing (see docs/mac.md). No effect elsewhere."
        ),
    ] = Wired.OFF
    keep_warm_s: Annotated[
        Annotated[float, Meta(ge=0, le=3600)],
        Meta(
            description="Seconds after the last request in which an idle GPU computes one token "
            "every half second, so that the next turn finds the weights in its memory (see "
            "docs/mac.md); on mains with calm memory only, 0 never. No effect on a CPU, for "
            "embeddings or with `hosts`."
        ),
    ] = 60.0


class Speculation(StrEnum):
    """Speculative decoding: draft tokens in decode steps."""

    AUTO = "auto"
    OFF = "off"


class Preset(Strict, frozen=True):
    """One service. `description` is the line that `mlx-stack presets` shows."""

    model: ModelSpec
    name: Annotated[
        str, Meta(description="The name of the service; the name of the file, if left out.")
    ] = ""
    description: Annotated[str, Meta(description="The line that `mlx-stack presets` shows.")] = ""
    kind: Annotated[
        ServiceKind,
        Meta(description="`chat` generates text; `embedding` serves vectors and has no slots."),
    ] = ServiceKind.CHAT
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Machines that compute this model together, this one first, by the "
            "addresses at which they reach each other; none: this one alone."
        ),
    ] = ()
    slots: SlotSpec = field(default_factory=SlotSpec)
    kv: KVSpec = field(default_factory=KVSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    speculation: Annotated[
        Speculation,
        Meta(
            description="`auto` drafts tokens that the grammar forces or that were seen "
            "before, where it pays; the output is the same. `off` does not."
        ),
    ] = Speculation.AUTO
    prefill: PrefillSpec = field(default_factory=PrefillSpec)
    queue: QueueSpec = field(default_factory=QueueSpec)
    prefix_cache: PrefixCacheSpec = field(default_factory=PrefixCacheSpec)
    agents: AgentsSpec = field(default_factory=AgentsSpec)
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    subagents: Annotated[
        ThinkingSpec, Meta(description="Thinking of sub-agents, which their clients announce.")
    ] = field(default_factory=ThinkingSpec)
    clients: Annotated[
        dict[str, ClientSpec],
        Meta(
            description="Thinking of the requests of a program, by the product in its User-Agent: "
            "`claude-code`, `codex`, `opencode`, `qwen-code`, or a pattern such as `open*`."
        ),
    ] = field(default_factory=dict)
    structured_output: StructuredOutputSpec = field(default_factory=StructuredOutputSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    device: DeviceSpec = field(default_factory=DeviceSpec)
    vision: VisionSpec = field(default_factory=VisionSpec)
    template: Annotated[
        dict[str, Any],
        Meta(description="Variables for the chat template, beside those that a request gives."),
    ] = field(default_factory=dict)
