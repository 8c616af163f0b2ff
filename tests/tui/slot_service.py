"""A service that only keeps slots: files of contexts, and a list of what it was asked to do."""

from typing import Any

from mlxstack.core.errors import NotFound


class Clerk:
    """Holds `n_tokens` per slot, and the same per file."""

    url = "http://127.0.0.1:7109"

    def __init__(self) -> None:
        self.slots = {0: 31_204, 1: 6_912, 2: 2_144}
        self.files: dict[str, int] = {}
        self.asked: list[tuple[str, int, str]] = []

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        slot, _, action = path.removeprefix("/slots/").partition("?action=")
        if not action:
            self.asked.append((path, len(body), ""))
            return {"n_bytes": 3 * 2**30}
        return self._change(int(slot), action, body.get("filename", ""))

    async def delete(self, path: str) -> dict[str, Any]:
        self.asked.append((path, 0, ""))
        return {}

    def _change(self, slot: int, action: str, filename: str) -> dict[str, Any]:
        self.asked.append((action, slot, filename))
        n = self.slots[slot]
        match action:
            case "save":
                self.files[filename] = n
                sizes = {"n_saved": n, "n_written": n * 8, "n_bytes": n * 8}
            case "restore":
                if filename not in self.files:
                    raise NotFound(f"there is no slot file [b]{filename}[/b] \x1b[31m")
                self.slots[slot] = n = self.files[filename]
                sizes = {"n_restored": n, "n_read": n * 8}
            case _:
                self.slots[slot] = 0
                sizes = {"n_erased": n}
        timings = {"save_ms": 12.5, "restore_ms": 3.0}
        return {"id_slot": slot, "filename": filename, "timings": timings, **sizes}
