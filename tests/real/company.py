"""Answers alone and beside seven others: `python -m tests.real.company FOLDER --exact on`.

Each prompt is answered alone from nothing, then by eight clients at once, whose answers begin and
end at different times, from nothing and once more from KV. An answer counts as equal if all its
tokens are those of the answer alone, both times.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from msgspec import Struct

from mlxstack.core.exact_rows import ExactBits
from mlxstack.core.preset import BatchSpec, SlotSpec
from tests.real.asking import Asker, Ids, asking, texts

N_CLIENTS = 8


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Counted(Struct, frozen=True):
    """Answers compared so far, and the equal ones."""

    n: int
    n_equal_cold: int
    n_equal_cached: int

    def __str__(self) -> str:
        cold = f"{self.n_equal_cold} of {self.n} equal beside others, cold"
        return f"{cold}; {self.n_equal_cached} of {self.n} cached"


def prompts_of(asker: Asker, n: int, seed: int) -> list[Ids]:
    """`n` pieces of real texts of 24 to 64 tokens."""
    random = Random(seed)
    pieces = [asker.ids(text, 3000) for text in texts().values()]
    prompts = []
    for i in range(n):
        piece = pieces[i % len(pieces)]
        size = random.randrange(24, 64)
        start = random.randrange(len(piece) - size)
        prompts.append(piece[start : start + size])
    return prompts


def together(asker: Asker, prompts: Sequence[Ids], n_tokens: int, *, is_cached: bool) -> list[Ids]:
    """Answers by eight clients at once; other, shorter requests come and go between."""
    ended = threading.Event()

    def others() -> None:
        random = Random(len(prompts))
        while not ended.is_set():
            ids = prompts[random.randrange(len(prompts))][random.randrange(8) :]
            asker.answer(ids, random.randrange(3, 24), cache_prompt=False)

    def answer(ids: Ids) -> Ids:
        return asker.answer(ids, n_tokens, cache_prompt=is_cached).tokens

    with ThreadPoolExecutor(N_CLIENTS) as pool:
        between = pool.submit(others)
        answers = list(pool.map(answer, prompts))
        ended.set()
        between.result()
    return answers


def compare(asker: Asker, prompts: Sequence[Ids], n_tokens: int) -> Counted:
    """Compare the answers of these prompts."""
    alone = [asker.cold(ids, n_tokens) for ids in prompts]
    cold = together(asker, prompts, n_tokens, is_cached=False)
    for ids in prompts:
        asker.answer(ids, 1)
    cached = together(asker, prompts, n_tokens, is_cached=True)
    pairs = [(a == b, a == c) for a, b, c in zip(alone, cold, cached, strict=True)]
    return Counted(len(pairs), sum(p[0] for p in pairs), sum(p[1] for p in pairs))


def main() -> None:
    """Compare answers of a model folder in rounds of eight, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--exact", type=ExactBits, default=ExactBits.ON)
    args = parser.parse_args()
    total = Counted(0, 0, 0)
    sections = {
        "batch": BatchSpec(exact=args.exact, max_size=N_CLIENTS),
        "slots": SlotSpec(count=N_CLIENTS, n_ctx=1024),
    }
    with tempfile.TemporaryDirectory() as home, asking(args.folder, Path(home), **sections) as ask:
        exact = ask.client.get("/props").raise_for_status().json()["exact"]
        state = "on" if exact["is_on"] else "off"
        say(f"{args.folder.name}: equal bits {state}: {exact['reason']}")
        for seed in range(-(-args.answers // N_CLIENTS)):
            counted = compare(ask, prompts_of(ask, N_CLIENTS, seed), args.tokens)
            total = Counted(
                total.n + counted.n,
                total.n_equal_cold + counted.n_equal_cold,
                total.n_equal_cached + counted.n_equal_cached,
            )
            say(f"{args.folder.name} {args.exact.value}: {total}")
    is_equal = total.n == total.n_equal_cold == total.n_equal_cached
    sys.exit(0 if is_equal or args.exact is ExactBits.OFF else 1)


if __name__ == "__main__":
    main()
