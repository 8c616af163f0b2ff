"""Time of an answer by who sent its prompt before: `python -m tests.endurance.salt_timing ROUNDS`.

After a prompt come a new one, the same again, and the same with another salt. The ratios to the
time of a new one tell what a tenant learns about the prompts of others. Each answer has one token.
"""

import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
from msgspec import Struct

from mlxstack.core.preset import SlotSpec
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

N_WORDS = 1200
N_CTX = 4096
N_SLOTS = 2


class SaltTiming(Struct, frozen=True):
    """Medians in seconds, and the most prompt tokens that were found again."""

    new_s: float
    own_s: float
    others_s: float
    n_own: int
    n_others: int

    def __str__(self) -> str:
        """The ratios, for people."""
        own = self.own_s / self.new_s
        share = self.others_s / self.new_s
        return (
            f"new {self.new_s * 1000:.1f} ms; again with its salt {own:.3f} of it "
            f"({self.n_own} tokens found), with another salt {share:.3f} ({self.n_others} found)"
        )


def salt_timing(folder: Path, n_rounds: int, seed: int = 1) -> SaltTiming:
    """Medians of `n_rounds`, each with its three requests in an order by chance."""
    preset = tiny_preset(folder / "tiny", slots=SlotSpec(count=N_SLOTS, n_ctx=N_CTX))
    random = Random(seed)
    salts = (f"s{n}" for n in count())
    seconds: dict[str, list[float]] = {"new": [], "own": [], "others": []}
    n_cached = dict.fromkeys(seconds, 0)
    with (
        running(preset, folder / "home") as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        for _ in range(n_rounds):
            prompt = _prompt(random)
            salt = next(salts)
            _asked(http, prompt, salt)
            kinds = {
                "new": (_prompt(random), next(salts)),
                "own": (prompt, salt),
                "others": (prompt, next(salts)),
            }
            for kind in random.sample(list(kinds), len(kinds)):
                one_s, n_found = _asked(http, *kinds[kind])
                seconds[kind].append(one_s)
                n_cached[kind] = max(n_cached[kind], n_found)
    new_s, own_s, others_s = (median(times) for times in seconds.values())
    return SaltTiming(new_s, own_s, others_s, n_cached["own"], n_cached["others"])


def _prompt(random: Random) -> str:
    return " ".join(random.choice("abcdefgh") for _ in range(N_WORDS))


def _asked(http: httpx.Client, prompt: str, salt: str) -> tuple[float, int]:
    """Seconds of a whole answer of one token, and the tokens of its prompt that were found."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": 1, "cache_salt": salt}
    began = time.perf_counter()
    answer = http.post("/completion", json=body).raise_for_status()
    seconds = time.perf_counter() - began
    return seconds, int(answer.json()["timings"]["cache_n"])


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print(salt_timing(Path(tempfile.mkdtemp(prefix="salts-")), rounds), flush=True)
