"""What can be done to a slot beside generating, and what comes back."""

from enum import StrEnum

from msgspec import Struct


class SaveSlot(Struct, frozen=True):
    """Write the context of `slot` to the slot file `name`, when the slot is idle."""

    slot: int
    name: str


class RestoreSlot(Struct, frozen=True):
    """Replace the context of `slot` by the one in the slot file `name`, when the slot is idle."""

    slot: int
    name: str


class EraseSlot(Struct, frozen=True):
    """Empty the context of `slot`, when the slot is idle."""

    slot: int


class EvictAgentFromSlot(Struct, frozen=True):
    """Take `agent` out of `slot` when the slot is idle; nothing when somebody else sits there.

    What `is_kept` goes to disk first.
    """

    slot: int
    agent: str
    is_kept: bool


SlotCommand = SaveSlot | RestoreSlot | EraseSlot | EvictAgentFromSlot


class SlotSaveResult(Struct, frozen=True):
    """`n_saved` tokens; `n_written` bytes newly written of `n_bytes` of the whole state."""

    slot: int
    name: str
    n_saved: int
    n_written: int
    n_bytes: int
    save_ms: float


class SlotRestoreResult(Struct, frozen=True):
    """`n_restored` tokens from `n_read` bytes; the time ends after evaluation."""

    slot: int
    name: str
    n_restored: int
    n_read: int
    restore_ms: float


class SlotEraseResult(Struct, frozen=True):
    """`n_erased` tokens are forgotten."""

    slot: int
    n_erased: int


SlotCommandResult = SlotSaveResult | SlotRestoreResult | SlotEraseResult


class GetCacheStats(Struct, frozen=True):
    """Show the KV memory: a `core.frame.CacheView`, at most `limit` prefixes in it."""

    limit: int = 20


class PinPrefix(Struct, frozen=True):
    """Name the longest known part of these tokens, and keep it whatever happens."""

    name: str
    tokens: tuple[int, ...]
    salt: str = ""


class PinKnownPrefix(Struct, frozen=True):
    """Name the prefix that has this id in a `core.frame.CacheView`, and keep it."""

    name: str
    id: str


class UnpinPrefix(Struct, frozen=True):
    """Let go of a named prefix."""

    name: str


class PinAgent(Struct, frozen=True):
    """Keep the longest known part of an agent's last prompt under the name of `pin_of`."""

    agent: str


class ReleaseAgentKV(Struct, frozen=True):
    """An agent claims nothing any more; what only it has in memory leaves, if it is on disk.

    What `is_kept` not leaves memory even so.
    """

    agent: str
    is_kept: bool


class ListSharedPrefixes(Struct, frozen=True):
    """What several conversations began with, also before a restart: a tuple of token tuples."""


class RetainPrefix(Struct, frozen=True):
    """Keep the known part of such a beginning longer than others."""

    tokens: tuple[int, ...]


class EmbedTexts(Struct, frozen=True):
    """One vector for each text: a tuple of bytes, little-endian float32, of length one."""

    texts: tuple[tuple[int, ...], ...]


class ClearCache(Struct, frozen=True):
    """Forget all parked KV in memory that is neither in use nor pinned."""


class GCScope(StrEnum):
    """What a sweep of the disk may take: KV that nothing saved names, or saved contexts too."""

    KV = "kv"
    ALL = "all"


class CollectGarbage(Struct, frozen=True):
    """Delete from the disk what was used longest ago, never what is in use.

    Until `max_bytes` are left, and everything older than `max_age_s` seconds; None is no bound.
    With an `agent`, only what that agent saved and nobody else names, and only that is counted.
    `is_dry` only tells.
    """

    max_bytes: int | None = None
    max_age_s: float | None = None
    scope: GCScope = GCScope.ALL
    agent: str | None = None
    is_dry: bool = False


class ReclaimMemory(Struct, frozen=True):
    """The computer runs short of memory: 1 drops cold parked KV, 2 everything not in use."""

    level: int


class LocateAgentKV(Struct, frozen=True):
    """Where the last prompts of these agents are kept beside the slots: a tuple of `Kept`."""

    agents: tuple[str, ...]


CacheCommand = (
    GetCacheStats
    | LocateAgentKV
    | ListSharedPrefixes
    | RetainPrefix
    | PinPrefix
    | PinKnownPrefix
    | PinAgent
    | ReleaseAgentKV
    | UnpinPrefix
    | ClearCache
    | ReclaimMemory
    | EmbedTexts
)


class PinnedPrefix(Struct, frozen=True):
    """`n_tokens` of the prefix are kept under this name; 0 when nothing of it is known."""

    name: str
    n_tokens: int
    n_bytes: int


class AgentKVLocation(Struct, frozen=True):
    """`n_tokens` of an agent's last prompt are kept, in so many bytes of memory and of disk.

    Bytes that lie in both places count in both; others may share them.
    """

    agent: str
    n_tokens: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class FlushResult(Struct, frozen=True):
    """`n_contexts` are on disk now, for which `n_bytes` were newly written."""

    n_contexts: int
    n_bytes: int


class GCItem(Struct, frozen=True):
    """One file that a sweep deletes; `ref` are the identity and key of a KV file."""

    title: str
    path: str
    n_bytes: int
    reason: str
    ref: tuple[str, str] | None = None


class GCResult(Struct, frozen=True):
    """What a sweep came to, in files and bytes. `skipped` are paths, with the reason."""

    victims: tuple[GCItem, ...] = ()
    n_before: int = 0
    n_after: int = 0
    skipped: tuple[str, ...] = ()
    is_dry: bool = False


class FreedBytes(Struct, frozen=True):
    """Bytes that left memory."""

    n_bytes: int


def pin_of(agent: str) -> str:
    """The name under which the KV of a pinned agent is kept."""
    return f"agent:{agent}"
