"""What all who take part in a chaos share: the service, the wire, the books, what was done."""

import time
from pathlib import Path
from threading import Lock
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tests.endurance.household import Household
from tests.endurance.talking import Told, Wire
from tests.endurance.tally import Tally, read_counters


class Outcome(Struct, frozen=True):
    """What a run came to; `n_proven` answers were those from cold."""

    seed: int
    n_rounds: int = 0
    n_requests: int = 0
    n_unsure: int = 0
    n_swaps: int = 0
    n_kills: int = 0
    n_meddled: int = 0
    n_proven: int = 0


class Stage:
    """`did` is what the present round has done so far."""

    def __init__(self, root: Path, seed: int) -> None:
        self.house = Household(root)
        self.wire = Wire(self.house.url)
        self.tally = Tally()
        self.outcome = Outcome(seed)
        self.did: list[str] = []
        self._lock = Lock()

    def ask(
        self,
        path: str,
        expected: set[int],
        method: str = "POST",
        body: dict[str, Any] | None = None,
        *,
        is_asked: bool = False,
    ) -> Told:
        """Anything but an answer; it must be one of the `expected` statuses."""
        self.did.append(f"{method} {path} {body or ''}"[:90])
        reply = self.wire.ask(method, path, body)
        assert reply.status is None or reply.status in expected, f"{path}: {reply}"
        if is_asked:
            self.tally.unsure()
        return reply

    def hear(self, reply: Told, expected: set[int]) -> None:
        """An answer; it goes into the books."""
        assert reply.status is None or reply.status in expected, f"{reply}"
        self.count(n_requests=1)
        if reply.is_whole:
            self.tally.add(reply.n_prompt, reply.n_generated)
        elif reply.status not in {400, 404}:
            self.tally.unsure()
            self.count(n_unsure=1)

    def settle(self) -> None:
        """Nothing is under way, and the counters say what the clients saw."""
        end = time.monotonic() + 30
        while not (counted := read_counters(self.house.url)).is_idle and time.monotonic() < end:
            time.sleep(0.01)
        self.tally.check(counted)

    def count(self, **more: int) -> None:
        """Add to the outcome."""
        with self._lock:
            now = self.outcome
            self.outcome = replace(now, **{k: getattr(now, k) + v for k, v in more.items()})
