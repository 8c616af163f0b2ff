"""Many agents over few slots and a small budget: bytes stay true and bounded, tokens right."""

import gc
from pathlib import Path
from random import Random

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.preset import DiskSpec, PrefixCacheSpec, SlotSpec
from mlxstack.features.row_stacks.engine import RowStacker
from mlxstack.features.row_stacks.policy import StackingRules
from mlxstack.policy.kv.prefix_index_check import check_index
from tests.engine.harness import Driver, preset_of, prompt, running

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
    """Raises AssertionError at the first wrong token or byte above the budget.

    Rows are stacked after a step.
    """
    budget = ROOM_FOR * _context_bytes(model, home)
    cache = PrefixCacheSpec(memory_budget_pct=50, disk=DiskSpec(enabled=False))
    preset = preset_of(model, slots=SlotSpec(count=N_SLOTS, n_ctx=N_CTX), prefix_cache=cache)
    gc.collect()
    with running(preset, home, memory_bytes=2 * budget) as driver:
        turns = driver.engine.loaded.loop
        rules = StackingRules(least_steps=1, repaid_bytes=1 << 60, most_padding=10**6)
        turns.batch._grouper = RowStacker(turns.slot_kv.has_room, rules)
        play = Play(driver, budget, seed)
        while play.n_requests < n_requests:
            play.burst()
            play.weigh()
        check_index(driver.engine.loaded.loop.slot_kv.prefix_cache.index)
        counters = driver.engine.snapshot().counters
        share = counters.n_cached_tokens / (counters.n_cached_tokens + counters.n_prompt_tokens)
        return Outcome(play.n_requests, play.n_checked, play.most, budget, play.worst, share)


class Play:
    """Thirty growing conversations; a few of them speak at once, then the bytes are weighed."""

    def __init__(self, driver: Driver, budget: int, seed: int) -> None:
        self._driver = driver
        self._budget = budget
        self._random = Random(seed)
        self._head = prompt(130, seed=seed)
        self._histories = {n: self._head + prompt(20, seed=n) for n in range(N_AGENTS)}
        self._idle = mx.get_active_memory()
        self.n_requests = self.n_checked = self.most = 0
        self.worst = 0.0

    def burst(self) -> None:
        """As many agents as there are slots, and two more, all at once."""
        agents = self._random.sample(range(N_AGENTS), N_SLOTS + 2)
        asks = {
            agent: self._driver.submit(
                self._histories[agent],
                6,
                agent=f"agent-{agent}",
                checkpoint_positions=(len(self._head),),
            )
            for agent in agents
        }
        reported = self._look()
        assert reported <= self._budget, f"{reported} of {self._budget} bytes while serving"
        for agent, ask in asks.items():
            self._driver.finish(ask)
            self._go_on(agent, self._driver.tokens(ask))

    def weigh(self) -> None:
        """Reported and real bytes of KV, live and parked, while nobody speaks."""
        reported = self._look()
        real = mx.get_active_memory() - self._idle
        self.most = max(self.most, reported)
        assert reported <= self._budget, f"{reported} of {self._budget} bytes"
        self.worst = max(self.worst, abs(reported - real) / real)

    def _go_on(self, agent: int, answer: list[int]) -> None:
        history = self._histories[agent]
        if self.n_requests % 5 == 0:
            cold = self._driver.cold(history, 6)
            assert answer == cold, f"request {self.n_requests} of agent {agent}"
            self.n_checked += 1
        grown = history + tuple(answer) + prompt(12, seed=self.n_requests)
        is_over = len(grown) >= N_CTX - 20
        self._histories[agent] = self._head + prompt(20, seed=agent) if is_over else grown
        self.n_requests += 1

    def _look(self) -> int:
        view = self._driver.engine.cache.stats(1).result(timeout=60)
        assert isinstance(view.memory_bytes, int)
        return view.memory_bytes


def _context_bytes(model: Path, home: Path) -> int:
    """Of a full slot of this model."""
    preset = preset_of(model, slots=SlotSpec(count=1, n_ctx=N_CTX))
    with running(preset, home / "measured") as driver:
        driver.answer(prompt(N_CTX - 20), 8)
        n_bytes = driver.engine.snapshot().slots[0].n_bytes
    gc.collect()
    return n_bytes
