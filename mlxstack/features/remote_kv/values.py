"""KV exchange between services: prompts to fetch, bodies of `/kv` paths."""

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from mlxstack.core.interfaces import Manifest


class RemotePrompt(Struct, frozen=True):
    """Prompt that another service may prefill, as the engine sees it.

    `n_here` of its tokens are cached here, and the rest takes `local_s` seconds here (0: unknown)
    beside `n_decoding` requests that decode. A token has `token_bytes` of KV.
    """

    tokens: tuple[int, ...]
    salt: str
    checkpoint_positions: tuple[int, ...]
    n_here: int
    local_s: float
    n_decoding: int
    token_bytes: int


class RemoteKV(Protocol):
    """KV of other services. Thread-safe."""

    def fetch(
        self, prompt: RemotePrompt, compute_here: Callable[[], None], done: Callable[[], None]
    ) -> Callable[[], object] | None:
        """Bring a prompt's KV into the index; returns a cancel function.

        None without a peer. On any thread, `compute_here` is called when prefill is to go on here
        meanwhile, and `done` in the end.
        """


class KVQuery(Struct, frozen=True):
    """Body of POST /kv/match and /kv/prefill: tokens and model identity.

    The model is given by its `Identity.key()`. `salt` is that of their KV. With `is_computed`, what
    is missing is computed first.
    """

    identity: str
    tokens: tuple[int, ...]
    salt: str = ""
    checkpoint_positions: tuple[int, ...] = ()
    is_computed: bool = False


class KVMatch(Struct, frozen=True):
    """Answer of POST /kv/match: the first `n_tokens` are cached there.

    It computes `prefill_tps` prompt tokens per second (0: unknown), at once if it `is_idle`.
    """

    n_tokens: int
    prefill_tps: float = 0.0
    is_idle: bool = False


class KVOffer(Struct, frozen=True):
    """Answer of POST /kv/prefill: the KV files of `n_tokens`, with sizes."""

    n_tokens: int = 0
    segments: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    n_bytes: int = 0


class MissingKV(Struct, frozen=True):
    """Body and answer of POST /kv/missing: file keys, those missing."""

    identity: str
    keys: tuple[str, ...]


class MovedAgent(Struct, frozen=True):
    """Body of PUT /v1/agents/{id}/kv: history, facts, saved context if any."""

    messages: tuple[dict[str, Any], ...]
    facts: dict[str, Any]
    manifest: Manifest | None = None


class AgentMove(Struct, frozen=True):
    """An agent that was moved `to` a service, with KV of `n_tokens`.

    `n_sent` of the `n_bytes` were not there yet. It was deleted here unless `is_kept`.
    """

    id: str
    to: str
    n_tokens: int = 0
    n_bytes: int = 0
    n_sent: int = 0
    is_kept: bool = False


class PeerView(Struct, frozen=True):
    """Status of a peer: totals, and measured link speed (0: unknown).

    `trouble` is the last failure; it is left alone for `pause_s` more seconds.
    """

    url: str
    trouble: str = ""
    pause_s: float = 0.0
    link_bytes_per_s: float = 0.0
    n_fetched_tokens: int = 0
    n_fetched_bytes: int = 0
    n_prefills: int = 0
    n_failures: int = 0
