"""Rules for heads of clients: keeping, choosing and computing them."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.conversation import Conversation

MAX_HEADS = 32
MAX_BYTES = 8 << 20
"""Bytes of all heads on disk."""
MAX_HEAD_BYTES = 1 << 20

PRODUCTS = {
    "claude-cli": "claude",
    "claude-code": "claude",
    "codex_cli_rs": "codex",
    "codex_exec": "codex",
    "opencode": "opencode",
    "pi": "pi",
    "QwenCode": "qwen",
}
"""Clients by the product in their User-Agent."""


class HeadKey(Struct, frozen=True):
    """Client, version, folder and tenant of a head."""

    client: str
    """Name in `mlx-stack run`."""
    version: str = ""
    """Version of the program; empty if unknown."""
    folder: str = ""
    """Folder that it works in; empty for any."""
    salt: str = ""


class Head(Struct, frozen=True):
    """System messages, tools and reminders of a client."""

    key: HeadKey
    conversation: Conversation
    used_at: float
    """Unix seconds."""
    n_bytes: int = 0
    """Bytes of its file."""


class OtherWork(Struct, frozen=True):
    """Work of a service beside heads."""

    n_active: int = 0
    """Requests of others in slots."""
    n_waiting: int = 0
    is_calm: bool = True
    """Whether the computer's memory is."""


def last_head(candidates: Sequence[Head], key: HeadKey) -> Head | None:
    """Last head of a client, of its folder and version if possible."""
    of_client = [
        head for head in candidates if head.key.client == key.client and head.key.salt == key.salt
    ]
    return max(
        of_client,
        key=lambda head: (
            bool(key.folder) and head.key.folder == key.folder,
            bool(key.version) and head.key.version == key.version,
            head.used_at,
        ),
        default=None,
    )


def surplus(candidates: Sequence[Head]) -> tuple[Head, ...]:
    """Heads beyond the bounds, the longest unused ones."""
    n_bytes = 0
    beyond = []
    for i, head in enumerate(sorted(candidates, key=lambda head: -head.used_at)):
        n_bytes += head.n_bytes
        if i >= MAX_HEADS or n_bytes > MAX_BYTES:
            beyond.append(head)
    return tuple(beyond)


def may_compute(work: OtherWork) -> bool:
    """Whether a head may be computed: nothing else is done or waits."""
    return not work.n_active and not work.n_waiting and work.is_calm
