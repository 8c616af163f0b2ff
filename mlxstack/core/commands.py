"""Slot commands and the results of cache administration."""

from enum import StrEnum

from msgspec import Struct


class SaveSlot(Struct, frozen=True):
    """Write the context of the idle `slot` to the slot file `name`."""

    slot: int
    name: str


class RestoreSlot(Struct, frozen=True):
    """Replace the context of the idle `slot` by a slot file."""

    slot: int
    name: str


class EraseSlot(Struct, frozen=True):
    """Empty the context of `slot`, when the slot is idle."""

    slot: int


class EvictAgentFromSlot(Struct, frozen=True):
    """Evict `agent` from `slot` once the slot is idle.

    No-op if another agent occupies it. With `is_kept`, the context is written to disk first.
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
    """Scope of garbage collection: unreferenced KV only, or saved contexts too."""

    KV = "kv"
    ALL = "all"


class CollectGarbage(Struct, frozen=True):
    """Delete the least recently used files that are not in use.

    Until `max_bytes` are left, and everything older than `max_age_s` seconds; None is no bound.
    With an `agent`, only files that this agent alone refers to, and only those are counted.
    `is_dry` reports without deleting.
    """

    max_bytes: int | None = None
    max_age_s: float | None = None
    scope: GCScope = GCScope.ALL
    agent: str | None = None
    is_dry: bool = False


class PinnedPrefix(Struct, frozen=True):
    """A pinned prefix of `n_tokens`; 0 when nothing of it is known."""

    name: str
    n_tokens: int
    n_bytes: int


class AgentKVLocation(Struct, frozen=True):
    """Location of an agent's last prompt of `n_tokens`, with bytes per tier.

    Bytes in both tiers count in both; several agents may share them.
    """

    agent: str
    n_tokens: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class FlushResult(Struct, frozen=True):
    """`n_contexts` are on disk, for which `n_bytes` were newly written."""

    n_contexts: int
    n_bytes: int


class GCItem(Struct, frozen=True):
    """File to delete; `ref` is the identity and key of KV."""

    title: str
    path: str
    n_bytes: int
    reason: str
    ref: tuple[str, str] | None = None


class GCResult(Struct, frozen=True):
    """Files and bytes deleted. `skipped` are paths, with the reason."""

    victims: tuple[GCItem, ...] = ()
    n_before: int = 0
    n_after: int = 0
    skipped: tuple[str, ...] = ()
    is_dry: bool = False


class FreedBytes(Struct, frozen=True):
    """Bytes that left memory."""

    n_bytes: int


def pin_of(agent: str) -> str:
    """Name of the pin that keeps the KV of an agent."""
    return f"agent:{agent}"
