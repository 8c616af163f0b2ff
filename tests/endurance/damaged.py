"""Files of a home are damaged, and its service starts again or goes on: `... damaged SEED ROUNDS`.

KV files, slot files, saved contexts and histories of agents are flipped, cut, emptied, exchanged,
replaced by folders and links. Every greedy answer is the one from cold; a damaged history or slot
file is refused in words, the service goes on, and what is written next can be read.
"""

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests import models
from tests.api.running import running
from tests.endurance.meddling import EVERY_WAY, meddle

AGENTS = ("ann", "bob", "eve")
KINDS = (
    "kv/*/*/*.safetensors",
    "slots/*",
    "agents/*/*/manifest.json",
    "agents/*/history.json",
    "kv/*/note",
)
N_TRIES = 8
REFUSED = {400, 404, 409, 507}
PRESET = Preset(
    model=ModelSpec(id="demo"),
    slots=SlotSpec(count=2, n_ctx=2048),
    sampling=SamplingSpec(temperature=0, thinking=False),
    server=ServerSpec(port=0),
)

Messages = list[dict[str, Any]]


def small(folder: Path) -> Preset:
    """PRESET with a random model of two layers."""
    models.write(folder, models.LLAMA | {"num_hidden_layers": 2})
    return replace(PRESET, model=ModelSpec(id=str(folder)), name="small")


class DamageOutcome(Struct):
    """Rounds, files damaged, answers compared, histories and slot files that were refused."""

    n_rounds: int = 0
    n_damaged: int = 0
    n_compared: int = 0
    n_refused: int = 0


class Household:
    """A home whose service is started in every round; `known` are the histories as they must be."""

    def __init__(self, home: Path, seed: int, preset: Preset) -> None:
        self.home = home
        self.preset = preset
        self.random = Random(seed)
        self.known: dict[str, Messages] = {}
        self.did: list[str] = []
        self.outcome = DamageOutcome()

    def round(self) -> None:
        """Turns, saves, damage while it serves; the end of the service, more damage."""
        self.did = []
        with (
            running(self.preset, self.home) as live,
            httpx.Client(base_url=live.url, timeout=120) as http,
        ):
            for slot, agent in enumerate(AGENTS):
                self._turn(http, agent)
                self._slot(http, slot % self.preset.slots.count)
            self._damage(2)
            for slot, agent in enumerate(AGENTS):
                self._turn(http, agent)
                self._slot(http, slot % self.preset.slots.count)
            assert http.get("/health").is_success
            assert http.get("/v1/agents").is_success
        self._damage(3)
        self.outcome.n_rounds += 1

    def _damage(self, n_files: int) -> None:
        done = [meddle(self.home, self.random, KINDS, EVERY_WAY) for _ in range(n_files)]
        self.did += done
        self.outcome.n_damaged += sum(map(bool, done))

    def _turn(self, http: httpx.Client, agent: str) -> None:
        """The next turn of an agent, whose history is sent once where it was damaged."""
        new = {"role": "user", "content": f"What is stone {self.random.randrange(1000)}?"}
        past = self.known.get(agent, [{"role": "system", "content": f"You are {agent}. " * 60}])
        past = past[:1] if len(past) > 9 else past
        messages = [*past, new]
        plain = {"messages": messages, "max_tokens": 6, "temperature": 0}
        cold = http.post("/v1/chat/completions", json={**plain, "cache_prompt": False})
        answer = http.post("/v1/chat/completions", json={**plain, "agent": agent})
        assert answer.status_code == 200, f"{answer.text} after {self.did}"
        warm, expected = (reply.json()["choices"][0]["message"] for reply in (answer, cold))
        assert warm == expected, self.did
        self.outcome.n_compared += 1
        self.known[agent] = [*messages, {"role": "assistant", "content": warm["content"]}]
        stored = http.get(f"/v1/agents/{agent}/history")
        if stored.status_code == 200:
            stored_texts = [message["content"] for message in stored.json()["messages"]]
            assert stored_texts == [message["content"] for message in self.known[agent]], self.did
        else:
            assert stored.status_code in REFUSED and stored.json()["error"]["message"], self.did
            self.outcome.n_refused += 1

    def _slot(self, http: httpx.Client, slot: int) -> None:
        """Save a slot, restore a file: done, or refused in words; what was saved is restored."""
        names = ("a.bin", "b.bin")
        name = self.random.choice(names)
        # A save takes KV on the disk for sound; the restore that finds damage sets it aside.
        for _ in range(N_TRIES):
            saved = self._call(http, slot, "save", name)
            if not saved or self._call(http, slot, "restore", name):
                break
        else:
            raise AssertionError(f"{name} was saved and cannot be restored: {self.did}")
        self._call(http, slot, "restore", self.random.choice(names))

    def _call(self, http: httpx.Client, slot: int, action: str, name: str) -> bool:
        done = http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name})
        assert done.status_code in {200, *REFUSED}, f"{action} {name}: {done.text} {self.did}"
        if done.status_code != 200:
            assert done.json()["error"]["message"]
            self.outcome.n_refused += 1
        return done.status_code == 200


def damaged(home: Path, seed: int, n_rounds: int, preset: Preset = PRESET) -> DamageOutcome:
    """As many rounds, and one without damage, which refuses nothing that was not damaged."""
    household = Household(home, seed, preset)
    for _ in range(n_rounds):
        household.round()
    return household.outcome


if __name__ == "__main__":
    seed, n_rounds = (int(word) for word in sys.argv[1:3])
    print(damaged(Path(tempfile.mkdtemp(prefix="damaged-")), seed, n_rounds), flush=True)
