"""Many agents over few slots and a small budget: bytes stay true and bounded, tokens right."""

import gc
from pathlib import Path
from random import Random

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.preset import DiskSpec, PrefixCacheSpec, SlotSpec
from mlxstack.policy.audit import check
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.models import LLAMA

N_SLOTS = 4
N_AGENTS = 30
N_CTX = 512
ROOM_FOR = 6


class Outcome(Struct, frozen=True):
    """`worst` is the largest difference of reported and real bytes, as a share of the real."""

    n_requests: int
    n_checked: int
    most_bytes: int
    budget: int
    worst: float
    hit_share: float


def soak(model: Path, home: Path, n_requests: int, seed: int) -> Outcome:
    """Raises AssertionError at the first wrong token or byte above the budget."""
    random = Random(seed)
    per_token = 2 * LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"] * 32 * 4
    budget = ROOM_FOR * N_CTX * per_token
    cache = PrefixCacheSpec(memory_budget_pct=50, disk=DiskSpec(enabled=False))
    preset = preset_of(model, slots=SlotSpec(count=N_SLOTS, n_ctx=N_CTX), prefix_cache=cache)
    head = prompt(130, seed=seed)
    histories = {n: head + prompt(20, seed=n) for n in range(N_AGENTS)}
    gc.collect()
    with running(preset, home, memory_bytes=2 * budget) as driver:
        idle = mx.get_active_memory()
        most, worst, n_checked = 0, 0.0, 0
        for number in range(n_requests):
            agent = random.randrange(N_AGENTS)
            history = histories[agent]
            answer = driver.answer(history, 6, agent=f"agent-{agent}")
            if number % 5 == 0:
                assert answer == driver.cold(history, 6), f"request {number} of agent {agent}"
                n_checked += 1
            grown = history + tuple(answer) + prompt(12, seed=number)
            histories[agent] = grown if len(grown) < N_CTX - 20 else head + prompt(20, seed=agent)
            reported, real = _bytes(driver, idle)
            most = max(most, reported)
            assert reported <= budget, f"{reported} of {budget} bytes after request {number}"
            worst = max(worst, abs(reported - real) / real)
        check(driver.engine._turns.seating.memory.index)
        counters = driver.engine.snapshot().counters
        share = counters.n_cached_tokens / (counters.n_cached_tokens + counters.n_prompt_tokens)
        return Outcome(n_requests, n_checked, most, budget, worst, share)


def _bytes(driver: Driver, idle: int) -> tuple[int, int]:
    """Reported and real bytes of KV, live and parked, between two requests."""
    from mlxstack.core.act import Look

    view = driver.engine.tend(Look(1)).result(timeout=60)
    return view.memory_bytes, mx.get_active_memory() - idle
