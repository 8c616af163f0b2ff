"""First tokens of prompts that come together, with and without shared passes, by turns.

`python -m tests.engine.measure_shared_passes FOLDER`. One process computes both, and its CPU time
counts: other programs change it least.
"""

import random
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.preset import SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.loop import EngineLoop
from tests.engine.harness import WAIT_S, Driver, preset_of, running

N_PROMPTS = (2, 4, 8)
N_TOKENS = (16, 40, 128)
N_ROUNDS = 3
FOREVER = 1 << 16


class FirstTokens(Struct, frozen=True):
    """CPU seconds until the first tokens of a round, and its passes over prompts."""

    first_s: float
    mean_s: float
    last_s: float
    n_passes: int


def played(driver: Driver, n_prompts: int, n_tokens: int, max_shared: int) -> FirstTokens:
    """First tokens of prompts that the engine gets between two steps."""
    source = random.Random()
    asks = [
        Request(
            f"{source.random()}",
            PromptTokens(tuple(source.randrange(5, 900) for _ in range(n_tokens))),
            3,
            use_cache=False,
        )
        for _ in range(n_prompts)
    ]
    seconds: dict[str, float] = {}
    loop: Any = driver.engine.loaded.loop
    before = loop.stats.counters.n_model_calls
    began = time.process_time()

    def receive(sampled: TokenSampled) -> Any:
        seconds.setdefault(sampled.request, time.process_time() - began)
        return EngineLoop._receive(loop, sampled)

    def submit(loop: Any) -> None:
        prefill = replace(loop.prefill_policy, max_shared=max_shared)
        loop._limits = replace(loop._limits, prefill=prefill)
        loop._receive = receive
        for ask in asks:
            loop.submit(ask)

    driver.engine.run(submit).result(timeout=WAIT_S)
    for ask in asks:
        driver.finish(ask.id)
    n_passes = loop.stats.counters.n_model_calls - before
    times = seconds.values()
    return FirstTokens(min(times), fmean(times), max(times), n_passes)


def ratios(driver: Driver, n_prompts: int, n_tokens: int) -> list[float]:
    """Medians of shared against apart, in the order of the fields of `FirstTokens`."""
    apart: list[FirstTokens] = []
    shared: list[FirstTokens] = []
    played(driver, n_prompts, n_tokens, 0)
    played(driver, n_prompts, n_tokens, FOREVER)
    for _ in range(N_ROUNDS):
        apart.append(played(driver, n_prompts, n_tokens, 0))
        shared.append(played(driver, n_prompts, n_tokens, FOREVER))
    rounds = list(zip(apart, shared, strict=True))
    return [
        median(getattr(after, name) / getattr(before, name) for before, after in rounds)
        for name in FirstTokens.__struct_fields__
    ]


def main(folder: Path) -> None:
    """Print a line for each count and length."""
    preset = preset_of(folder, slots=SlotSpec(count=max(N_PROMPTS), n_ctx=2048))
    line = "{} prompts of {}: first {:.2f} x, mean {:.2f} x, last {:.2f} x, passes {:.2f} x\n"
    with tempfile.TemporaryDirectory() as home, running(preset, Path(home)) as driver:
        measured = driver.engine.loaded.loop.prefill_policy.max_shared
        sys.stdout.write(f"measured at load: prompts of up to {measured} tokens share a pass\n")
        for n_tokens, n_prompts in product(N_TOKENS, N_PROMPTS):
            sys.stdout.write(line.format(n_prompts, n_tokens, *ratios(driver, n_prompts, n_tokens)))
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
