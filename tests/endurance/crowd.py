"""A crowd on one engine: joins, leaves, cancels, seeds, penalties, pins, saves, all at random.

Greedy answers must be what the same prompt gets alone. Seeded: a failing run can be repeated.
"""

import time
from pathlib import Path
from random import Random

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.engine_events import RequestFailed, RequestFinished
from mlxstack.core.preset import SlotSpec
from mlxstack.core.request import SamplingParams
from mlxstack.policy.kv.prefix_index_check import check_index
from tests.engine.harness import Driver, preset_of, prompt, running

N_TOKENS = 10
HEADS = (0, 64, 128, 200)
MIN_COMPARED = 40

Tokens = tuple[int, ...]


class Outcome(Struct, frozen=True):
    """What a run came to. Bytes of MLX arrays before the first ask and after the last."""

    n_asks: int
    n_compared: int
    n_cancelled: int
    n_saved: int
    bytes_before: int
    bytes_after: int


def crowd(model: Path, home: Path, seconds: float, seed: int, n_tails: int = 24) -> Outcome:
    """Run for `seconds`, or until somebody saved; raises AssertionError at the first wrong token.

    The prompts are `n_tails` after each head.
    """
    random = Random(seed)
    pool = [
        prompt(h, seed=1) + prompt(random.randrange(2, 160), seed=n)
        for n in range(n_tails)
        for h in HEADS
    ]
    with running(preset_of(model, slots=SlotSpec(count=4, n_ctx=512)), home) as driver:
        alone = {tokens: driver.cold(tokens, N_TOKENS) for tokens in pool}
        _empty(driver)
        before = mx.get_active_memory()
        play = Play(driver, random, alone)
        end = time.monotonic() + seconds
        while time.monotonic() < end or play.n_saved == 0 or play.n_compared <= MIN_COMPARED:
            play.go_on()
        play.wait_for_all()
        check_index(driver.engine.loaded.loop.slot_kv.prefix_cache.index)
        _empty(driver)
        after = mx.get_active_memory()
    return Outcome(play.n_asks, play.n_compared, play.n_cancelled, play.n_saved, before, after)


class Play:
    """The open asks of a crowd, each with the tokens whose answer is known, and the counts."""

    def __init__(self, driver: Driver, random: Random, alone: dict[Tokens, list[int]]) -> None:
        self._driver = driver
        self._random = random
        self._alone = alone
        self._open: dict[str, Tokens | None] = {}
        self.n_asks = self.n_compared = self.n_cancelled = self.n_saved = 0

    def go_on(self) -> None:
        """A few come, some leave, somebody saves, most are waited for."""
        random = self._random
        for _ in range(random.randrange(1, 5)):
            self._come()
        if random.random() < 0.3:
            self._driver.engine.cancel(random.choice(list(self._open)))
        if random.random() < 0.2:
            self.n_saved += _save(self._driver, random)
        if len(self._open) > 12:
            self.wait_for(random.sample(list(self._open), 8))

    def wait_for(self, asks: list[str]) -> None:
        """Every answer that is known must be the known one, as far as it went."""
        for ask in asks:
            expected = self._open.pop(ask)
            end = self._driver.until(ask, (RequestFinished, RequestFailed))
            assert isinstance(end, RequestFinished), end
            self.n_cancelled += end.reason == "cancelled"
            if expected is not None:
                got = self._driver.tokens(ask)
                assert self._alone[expected][: len(got)] == got, f"{ask}: {got}"
                self.n_compared += 1

    def wait_for_all(self) -> None:
        """Until nobody is left."""
        self.wait_for(list(self._open))

    def _come(self) -> None:
        tokens = self._random.choice(list(self._alone))
        rules = _rules(self._random)
        ask = self._driver.submit(tokens, N_TOKENS, sampling=rules, **_extras(self._random))
        self._open[ask] = tokens if rules == SamplingParams() else None
        self.n_asks += 1


def _rules(random: Random) -> SamplingParams:
    if random.random() < 0.7:
        return SamplingParams()
    return SamplingParams(
        temperature=random.choice([0.0, 0.7, 1.5]),
        top_p=random.choice([1.0, 0.8]),
        seed=random.choice([None, 1, 2]),
        repetition_penalty=random.choice([1.0, 1.2]),
        presence_penalty=random.choice([0.0, 0.5]),
        logit_bias=random.choice([(), ((3, 2.0),)]),
        top_logprobs=random.choice([None, 2]),
    )


def _extras(random: Random) -> dict[str, object]:
    extras: dict[str, object] = {}
    if random.random() < 0.2:
        extras["slot"] = random.randrange(4)
    if random.random() < 0.3:
        extras["agent"] = f"agent-{random.randrange(6)}"
    if random.random() < 0.1:
        extras["use_cache"] = False
    return extras


def _save(driver: Driver, random: Random) -> int:
    slot = random.randrange(4)
    name = f"{random.randrange(3)}.bin"
    driver.engine.run_slot_command(SaveSlot(slot, name)).result(timeout=60)
    if random.random() < 0.5:
        driver.engine.run_slot_command(RestoreSlot(random.randrange(4), name)).result(timeout=60)
    return 1


def _empty(driver: Driver) -> None:
    from mlxstack.core.commands import EraseSlot

    for slot in range(4):
        driver.engine.run_slot_command(EraseSlot(slot)).result(timeout=60)
    driver.catch_up()
    driver.engine.cache.clear().result(timeout=60)
    mx.clear_cache()
