"""A service that only keeps slots: files of contexts, and a list of what it was asked to do."""

from typing import Any

from mlxstack.client.types import SlotErased, SlotRestored, SlotSaved
from mlxstack.core.errors import NotFound


class Clerk:
    """Holds `n_tokens` per slot, and the same per file."""

    url = "http://127.0.0.1:7109"

    def __init__(self) -> None:
        self.slots = {0: 31_204, 1: 6_912, 2: 2_144}
        self.files: dict[str, int] = {}
        self.asked: list[tuple[str, int, str]] = []

    async def save_slot(self, slot: int, filename: str) -> SlotSaved:
        self.asked.append(("save", slot, filename))
        self.files[filename] = n = self.slots[slot]
        return SlotSaved(slot, filename, n, n * 8, {"save_ms": 12.5}, n * 8)

    async def restore_slot(self, slot: int, filename: str) -> SlotRestored:
        self.asked.append(("restore", slot, filename))
        if filename not in self.files:
            raise NotFound(f"there is no slot file [b]{filename}[/b] \x1b[31m")
        self.slots[slot] = n = self.files[filename]
        return SlotRestored(slot, filename, n, n * 8, {"restore_ms": 3.0})

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((path, len(body), ""))
        return {"n_bytes": 3 * 2**30}

    async def delete(self, path: str) -> dict[str, Any]:
        self.asked.append((path, 0, ""))
        return {}

    async def erase_slot(self, slot: int) -> SlotErased:
        self.asked.append(("erase", slot, ""))
        n, self.slots[slot] = self.slots[slot], 0
        return SlotErased(slot, n)
