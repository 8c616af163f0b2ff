"""What the examination of a type of mlx-vlm found."""

from msgspec import Struct


class MoreRow(Struct, frozen=True):
    """A line of the table. Empty cells mean that it did not come to this."""

    name: str
    caches: str = ""
    batched: str = ""
    hit: str = ""
    served: str = ""
    """Over HTTP, cold and after a hit and a restart."""
    fork: str = ""
    stored: str = ""
    drafts: str = ""
    kv8: str = ""
    note: str = ""
    faults: tuple[str, ...] = ()
    """Checks that failed: what the row says of them is FAILED, and the page says why."""
