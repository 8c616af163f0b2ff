"""What is kept longer, and how the KV memory shows and checks itself."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstack.core.preset import DiskSpec, KVSpec, ModelSpec, PrefixCacheSpec, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens, TokenRow
from mlxstack.core.status import PrefixView
from mlxstack.engine import idle_wait
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import Segment
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.policy.kv import block_hash, prefix_index, shared_prefixes
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.patience import PATIENCE_S, wait_until

ONE_SLOT = SlotSpec(count=1, n_ctx=1024)
NO_DISK = PrefixCacheSpec(memory_budget_pct=20, disk=DiskSpec(enabled=False))
HEAD = prompt(256, seed=100)


@pytest.fixture
def one(model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    """One slot, so that every second conversation has to be parked; no disk."""
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefix_cache=NO_DISK)
    with running(preset, tmp_path) as driver:
        yield driver


def teach(driver: Driver, head: tuple[int, ...], n: int = 4) -> None:
    """So many conversations begin with this head; the last one is parked too."""
    for seed in range(n):
        driver.answer(head + prompt(60, seed=10 + seed), 2, agent=f"agent-{seed}")
    driver.answer(prompt(150, seed=60), 2)


def prefixes(driver: Driver) -> tuple[PrefixView, ...]:
    found: tuple[PrefixView, ...] = driver.engine.cache.stats().result(timeout=PATIENCE_S).prefixes
    return found


def n_cached(driver: Driver, tokens: tuple[int, ...]) -> int:
    ask = driver.submit(tokens, 2)
    driver.finish(ask)
    return int(driver.seated(ask).n_cached)


def test_d10_a_learned_head_that_was_evicted_is_guarded_when_it_is_back(one: Driver) -> None:
    teach(one, HEAD)
    one.engine.cache.clear().result(timeout=PATIENCE_S)
    one.answer(HEAD + prompt(60, seed=30), 2)
    one.answer(prompt(150, seed=61), 2)
    one.engine.cache.reclaim(1).result(timeout=PATIENCE_S)
    assert n_cached(one, HEAD + prompt(60, seed=31)) == 256


def test_d10_a_head_that_is_forgotten_is_guarded_no_longer(
    one: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefixes, "MAX_HEADS", 1)
    teach(one, HEAD)
    (first,) = (p.name for p in prefixes(one) if p.name)
    teach(one, prompt(256, seed=101))
    (second,) = (p.name for p in prefixes(one) if p.name)
    assert first != second
    nodes = one.engine.loaded.loop.slot_kv.prefix_cache.index.nodes
    assert {name for node in nodes.values() for name in node.soft_pins} == {second}


def test_d14_a_prefix_says_where_it_lies(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny"), slots=ONE_SLOT), tmp_path) as driver:
        driver.answer(HEAD, 2)
        driver.engine.cache.pin("head", PromptTokens(HEAD)).result(timeout=PATIENCE_S)
        driver.catch_up()
        (head,) = prefixes(driver)
        assert head.places == ("memory", "disk")


def test_d14_without_a_disk_a_prefix_lies_in_memory(one: Driver) -> None:
    one.answer(HEAD, 2)
    one.engine.cache.pin("head", PromptTokens(HEAD)).result(timeout=PATIENCE_S)
    assert [one.places for one in prefixes(one)] == [("memory",)]


def test_the_largest_context_is_counted(one: Driver) -> None:
    one.answer(prompt(300, seed=1), 5)
    one.answer(prompt(20, seed=2), 5)
    assert one.engine.snapshot().counters.n_tokens_max == 305


def test_arrays_that_were_replaced_are_not_held_any_more() -> None:
    memory = PrefixCache("identity", NO_DISK, 1 << 30)
    record = prefix_index.SegmentMeta("key", None, 0, 4, 64)
    old, new = (Segment(0, 4, (mx.zeros((2, 1, 4, 2)),), (0, 0)) for _ in range(2))
    memory.put(record, old, 0.0)
    memory.put(record, new, 1.0)
    assert memory.contains(new)
    assert not memory.contains(old)


def test_the_memory_checks_itself_when_nothing_is_to_be_done(
    one: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(idle_wait, "QUIET_S", 0.05)
    caplog.set_level(logging.ERROR)
    teach(one, HEAD)
    time.sleep(0.5)
    assert not caplog.records
    one.engine.loaded.loop.slot_kv.prefix_cache.index.memory_bytes += 1
    answer = one.answer(HEAD, 4)
    wait_until(lambda: "the bytes in memory do not add up" in caplog.text)
    assert one.answer(HEAD, 4) == answer


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call has hashed."""
    extend = block_hash.extend
    seen = list[int]()

    def counted(
        chain: block_hash.BlockHashes, row: TokenRow, end: int | None = None
    ) -> block_hash.BlockHashes:
        seen.append(len(row.tokens[chain.n_tokens : end]))
        return extend(chain, row, end)

    monkeypatch.setattr(block_hash, "extend", counted)
    return seen


def test_what_a_context_holds_is_hashed_once(model_of: ModelOf, hashed: list[int]) -> None:
    def feed(n_tokens: int) -> None:
        tokens = prompt(n_tokens, seed=len(context))
        model(mx.array([tokens]), cache=context.caches)
        context.extend(tokens)

    def n_hashed(context: SlotContext) -> int:
        hashed.clear()
        found = memory.chain_of(context)
        n = sum(hashed)
        context.chain = None
        assert found == memory.chain_of(context)
        return n

    spec = KVSpec(bits=8, group_size=32, quantized_start=600)
    model = loader.load(ModelSpec(str(model_of("tiny"))), spec).model
    context = SlotContext(CacheFactory(model, spec))
    memory = PrefixCache("identity", NO_DISK, 1 << 30, quantized_start=600)
    feed(300)
    assert n_hashed(context) == 300
    feed(200)
    assert (n_hashed(context), n_hashed(context)) == (200, 0)
    context.salt = "other"
    assert n_hashed(context) == 500
    feed(200)
    assert n_hashed(context) == 700
    context.rewind(650)
    feed(100)
    assert n_hashed(context) == 750
    twin = context.new_empty()
    twin.take_over(context)
    assert n_hashed(twin) == 0
    twin.clear()
    assert n_hashed(twin) == 0
