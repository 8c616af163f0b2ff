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
