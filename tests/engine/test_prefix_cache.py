"""The KV memory: parked, shared, kept on disk, explained (C, D, G and Z rows of the features)."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.engine_events import KVSource, TokenSampled
from mlxstack.core.errors import OutOfMemory
from mlxstack.core.preset import DiskSpec, EvictionPolicy, KVSpec, PrefixCacheSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.engine.model.cache_adapters import STEP
from mlxstack.policy.kv.prefix_index import common_prefix
from mlxstack.policy.kv.prefix_index_check import check_index
from mlxstack.store.files import Disk
from mlxstack.store.kv_store import DiskKVStore
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, array_bytes, preset_of, prompt, running
from tests.models import VOCAB
from tests.patience import PATIENCE_S, wait_until
from tests.repetition import in_soak

KINDS = ["tiny-swa", "tiny-hybrid", *in_soak("tiny", "tiny-later", "tiny-mla", "tiny-8bit")]
PRECISIONS = {
    "tiny-8bit": KVSpec(bits=8, group_size=32),
    "tiny-later": KVSpec(bits=4, group_size=32, quantized_start=100),
}
HEAD = prompt(300, seed=100)
ONE_SLOT = SlotSpec(count=1, n_ctx=2048)
NO_DISK = PrefixCacheSpec(memory_budget_pct=20, disk=DiskSpec(enabled=False))


@pytest.fixture(params=KINDS)
def preset(request: pytest.FixtureRequest, model_of: ModelOf) -> Preset:
    kv = PRECISIONS.get(request.param)
    model = model_of("tiny" if kv else request.param)
    return preset_of(model, kv=kv or KVSpec(), slots=ONE_SLOT)


def with_cache(preset: Preset, **more: Any) -> Preset:
    cache = msgspec.structs.replace(preset.prefix_cache, **more)
    return msgspec.structs.replace(preset, prefix_cache=cache)


@pytest.fixture
def one(model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    """One slot, so that every second conversation has to be parked; no disk."""
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefix_cache=NO_DISK)
    with running(preset, tmp_path) as driver:
        yield driver


def memory_of(driver: Driver) -> Any:
    return driver.engine.loaded.loop.slot_kv.prefix_cache


def test_g10_parked_and_resumed_goes_on_as_if_alone(preset: Preset, tmp_path: Path) -> None:
    mine = HEAD + prompt(80, seed=1)
    other = prompt(200, seed=2)
    with running(preset, tmp_path) as driver:
        answer = tuple(driver.answer(mine, agent="a"))
        driver.answer(other, agent="b")
        follow_up = mine + answer + prompt(20, seed=3)
        ask = driver.submit(follow_up, agent="a")
        driver.finish(ask)
        seated = driver.seated(ask)
        assert seated.source is KVSource.PARKED
        assert seated.n_cached >= len(mine) - 128
        assert driver.tokens(ask) == driver.cold(follow_up)


def test_d24_the_first_request_after_a_restart_hits_the_disk(
    preset: Preset, tmp_path: Path
) -> None:
    mine = HEAD + prompt(80, seed=1)
    with running(preset, tmp_path) as driver:
        answer = tuple(driver.answer(mine))
        follow_up = mine + answer + prompt(20, seed=3)
        cold = driver.cold(follow_up)
    with running(preset, tmp_path) as driver:
        ask = driver.submit(follow_up)
        driver.finish(ask)
        seated = driver.seated(ask)
        assert seated.source is KVSource.DISK
        assert seated.n_cached >= 384
        assert driver.tokens(ask) == cold


def test_d3_two_agents_hold_a_shared_head_once(one: Driver) -> None:
    mine = HEAD + prompt(100, seed=1)
    yours = HEAD + prompt(100, seed=2)
    one.answer(mine, agent="a")
    one.answer(prompt(200, seed=9), agent="c")
    index = memory_of(one).index
    alone = index.memory_bytes
    ask = one.submit(yours, agent="b")
    one.finish(ask)
    assert one.seated(ask).n_cached == len(HEAD)
    one.answer(prompt(200, seed=8), agent="c")
    per_token = alone / (400 + 16)
    grown = index.memory_bytes - alone
    n_other = 200 + 16
    assert grown <= per_token * (400 + 16 - len(HEAD) + n_other + 128)
    check_index(index)
    assert one.answer(mine, agent="a") == one.cold(mine)
    assert one.answer(yours, agent="b") == one.cold(yours)


def test_d2_parked_branches_inside_one_block_are_found_to_the_token(one: Driver) -> None:
    """Each prompt leaves an earlier one inside the second block; none of them is live."""
    one.answer(HEAD, 2)
    branches = [HEAD]
    for before, n_common in ((0, 140), (1, 170), (2, 190), (2, 175), (1, 141)):
        one.answer(prompt(200, seed=39), 2)
        tokens = branches[before][:n_common] + prompt(60, seed=n_common)
        ask = one.submit(tokens, 4)
        one.finish(ask)
        longest = max(common_prefix(branch, tokens) for branch in branches)
        assert one.seated(ask).n_cached == longest >= n_common
        branches.append(tokens)
    assert one.tokens(ask) == one.cold(branches[-1], 4)


def test_d2_a_changed_token_ends_the_match(one: Driver) -> None:
    one.answer(HEAD)
    one.answer(prompt(200, seed=9))
    changed = (*HEAD[:130], (HEAD[130] + 1) % VOCAB, *HEAD[131:])
    ask = one.submit(changed)
    one.finish(ask)
    assert one.seated(ask).n_cached == 130
    assert one.tokens(ask) == one.cold(changed)
    one.answer(prompt(200, seed=9))
    moved = prompt(128, seed=5) + HEAD[:128] + prompt(40, seed=6)
    ask = one.submit(moved)
    one.finish(ask)
    assert one.seated(ask).n_cached == 0


def test_d1_without_prefix_cache_nothing_is_shared(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(
        model_of("tiny"), prefix_cache=PrefixCacheSpec(enabled=False, disk=DiskSpec(enabled=False))
    )
    with running(preset, tmp_path) as driver:
        driver.answer(HEAD + prompt(50, seed=1), slot=0)
        ask = driver.submit(HEAD + prompt(50, seed=2), slot=1)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 0
        driver.answer(prompt(300, seed=4), slot=0)
        assert memory_of(driver).index.memory_bytes == 0


def test_d4_and_f8_the_budget_holds_and_is_real(model_of: ModelOf, tmp_path: Path) -> None:
    import gc

    import mlx.core as mx

    gc.collect()
    budget = 4_000_000
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefix_cache=NO_DISK)
    preset = with_cache(preset, memory_budget_pct=50)
    with running(preset, tmp_path, memory_bytes=2 * budget) as driver:
        before = array_bytes()
        for n in range(40):
            driver.answer(prompt(200 + 10 * n, seed=n), 4)
            seating = driver.engine.loaded.loop.slot_kv
            reported = seating.live_bytes + seating.prefix_cache.index.memory_bytes
            assert reported <= budget
        assert memory_of(driver).index.n_evicted > 0
        mx.clear_cache()
        real = array_bytes() - before
        assert real == pytest.approx(reported, rel=0.1)
        check_index(memory_of(driver).index)


def held_bytes(driver: Driver) -> int:
    """Bytes of live and parked KV."""
    seating = driver.engine.loaded.loop.slot_kv
    return int(seating.live_bytes + seating.prefix_cache.index.memory_bytes)


def test_d4_the_budget_holds_when_slots_are_restored(model_of: ModelOf, tmp_path: Path) -> None:
    budget = 2_500_000
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=3, n_ctx=2048))
    preset = with_cache(preset, memory_budget_pct=50)
    with running(preset, tmp_path) as driver:
        for n in range(3):
            driver.answer(prompt(600, seed=n), 4, slot=n)
            driver.engine.run_slot_command(SaveSlot(n, f"{n}.bin")).result(timeout=PATIENCE_S)
        driver.answer(prompt(1500, seed=9), 4, slot=0)
        driver.engine.run_slot_command(SaveSlot(0, "long.bin")).result(timeout=PATIENCE_S)
    with running(preset, tmp_path, memory_bytes=2 * budget) as driver:
        mx.reset_peak_memory()
        before = array_bytes()
        acts = [driver.engine.run_slot_command(RestoreSlot(n, f"{n}.bin")) for n in range(3)]
        for action in acts:
            assert action.result(timeout=PATIENCE_S).n_restored > 600  # type: ignore[union-attr]
        assert mx.get_peak_memory() - before <= 1.1 * budget
        assert held_bytes(driver) <= budget
        held = driver.context(2)
        with pytest.raises(OutOfMemory, match="budget is 2500000"):
            driver.engine.run_slot_command(RestoreSlot(2, "long.bin")).result(timeout=PATIENCE_S)
        assert driver.context(2) == held
        follow_up = prompt(600, seed=0) + prompt(20, seed=5)
        assert driver.answer(follow_up, 4) == driver.cold(follow_up, 4)


def test_d4_a_slot_restored_in_the_same_step_is_idle_for_the_next(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=2048))
    preset = with_cache(preset, memory_budget_pct=50)
    with running(preset, tmp_path) as driver:
        for n in range(2):
            driver.answer(prompt(600, seed=n), 4, slot=n)
            driver.engine.run_slot_command(SaveSlot(n, f"{n}.bin")).result(timeout=PATIENCE_S)
    with running(preset, tmp_path, memory_bytes=5_000_000) as driver:
        # The engine's thread goes on only when the reader has something for it: no step between.
        inbox = driver.engine._inbox
        first = driver.engine.run_slot_command(RestoreSlot(0, "0.bin"))
        first.add_done_callback(lambda _: wait_until(lambda: not inbox.empty()))
        second = driver.engine.run_slot_command(RestoreSlot(1, "1.bin"))
        assert second.result(timeout=PATIENCE_S).n_restored > 600  # type: ignore[union-attr]
        assert [len(driver.context(slot)) > 0 for slot in range(2)] == [False, True]


def test_d4_room_is_made_before_a_context_comes_back(model_of: ModelOf, tmp_path: Path) -> None:
    budget = 4_000_000
    parked = 2048 * 600
    live = 2048 * 768
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefix_cache=NO_DISK)
    preset = with_cache(preset, memory_budget_pct=50)
    mine = prompt(600, seed=1)
    with running(preset, tmp_path, memory_bytes=2 * budget) as driver:
        before = array_bytes()
        driver.answer(mine, 2)
        driver.answer(prompt(600, seed=2), 2)
        mx.reset_peak_memory()
        ask = driver.submit(mine + prompt(4, seed=3), 2)
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.PARKED
        # The one that leaves is parked, and is gone before the other is copied.
        assert mx.get_peak_memory() - before <= 2 * parked + 1.3 * live
        assert held_bytes(driver) <= budget


def test_d6_max_entries(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefix_cache=NO_DISK)
    with running(with_cache(preset, max_entries=5), tmp_path) as driver:
        for n in range(9):
            driver.answer(prompt(200, seed=n), 4)
        assert len(memory_of(driver)._kept) <= 5
        assert memory_of(driver).index.n_evicted >= 2


@pytest.mark.parametrize("policy", list(EvictionPolicy))
def test_d5_a_hot_prefix_survives_a_scan_only_with_frequency(
    model_of: ModelOf, tmp_path: Path, policy: EvictionPolicy
) -> None:
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT, prefix_cache=NO_DISK)
    preset = with_cache(preset, max_entries=4, eviction_policy=policy)
    hot = prompt(256, seed=77)
    with running(preset, tmp_path) as driver:
        for n in range(10):
            driver.answer(hot + prompt(20, seed=n), 2)
            driver.answer(prompt(150, seed=1000), 2)
        for n in range(12):
            driver.answer(prompt(150, seed=2000 + n), 2)
        ask = driver.submit(hot + prompt(20, seed=99), 2)
        driver.finish(ask)
        is_kept = driver.seated(ask).n_cached >= 256
        assert is_kept == (policy is EvictionPolicy.LRU_FREQUENCY)


def test_g11_turns_write_only_what_is_new(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT)
    with running(preset, tmp_path) as driver:
        history = HEAD
        for turn in range(8):
            history += tuple(driver.answer(history, agent="a")) + prompt(30, seed=turn)
            driver.answer(prompt(140, seed=500), 2, agent="b")
        driver.catch_up()
        files = list((tmp_path / "kv").rglob("*.safetensors"))
        n_bytes = sum(file.stat().st_size for file in files)
        per_token = memory_of(driver).index.memory_bytes / sum(
            node.record.end - node.record.start for node in memory_of(driver).index.nodes.values()
        )
        assert n_bytes <= 1.3 * per_token * (len(history) + 200) + 4096 * len(files)


@pytest.mark.parametrize("kind", ["tiny-hybrid", *in_soak("tiny", "tiny-swa")])
def test_z8_agents_outnumber_slots(model_of: ModelOf, tmp_path: Path, kind: str) -> None:
    preset = preset_of(model_of(kind), slots=SlotSpec(count=3, n_ctx=2048))
    with running(preset, tmp_path) as driver:
        histories = {n: HEAD + prompt(60, seed=n) for n in range(6)}
        for turn in range(3):
            for n, history in histories.items():
                n_before = len(history) - 8 - 20
                ask = driver.submit(history, 8, agent=f"agent-{n}")
                driver.finish(ask)
                if turn:
                    assert driver.seated(ask).n_cached >= n_before
                histories[n] = history + tuple(driver.tokens(ask)) + prompt(20, seed=turn)
        check_index(memory_of(driver).index)
        for n, history in histories.items():
            assert driver.answer(history, 8, agent=f"agent-{n}") == driver.cold(history, 8)


def test_d16_reasons_for_a_miss(one: Driver) -> None:
    def reason(tokens: tuple[int, ...], **more: Any) -> str | None:
        ask = one.submit(tokens, 2, **more)
        one.finish(ask)
        miss = one.seated(ask).miss
        return None if miss is None else f"{miss.reason}"

    assert reason(HEAD, agent="a") == "cold"
    assert reason(HEAD + prompt(10), agent="a") is None
    assert reason(HEAD[:200] + prompt(100, seed=4), agent="a") == "diverged"
    assert reason(HEAD, agent="a", use_cache=False) == "disabled"


def test_a_damaged_kv_file_costs_a_cold_start_and_nothing_else(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT)
    mine = HEAD + prompt(80, seed=1)
    with running(preset, tmp_path) as driver:
        cold = driver.answer(mine)
    for file in (tmp_path / "kv").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 4
        file.write_bytes(data)
    with running(preset, tmp_path) as driver:
        assert driver.answer(mine) == cold
        driver.answer(prompt(200, seed=2))
        assert driver.answer(mine) == cold
        check_index(memory_of(driver).index)


def test_when_the_first_of_a_chain_is_damaged_the_rest_goes_with_it(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = preset_of(model_of("tiny"), slots=ONE_SLOT)
    mine = HEAD + prompt(80, seed=1)
    with running(preset, tmp_path) as driver:
        longer = mine + tuple(driver.answer(mine)) + prompt(300, seed=3)
        cold = driver.answer(longer)
    vault = DiskKVStore(tmp_path / "kv")
    (identity,) = {entry.identity for entry in vault.entries()}
    headers = sorted(vault.headers(identity), key=lambda head: head.start)
    assert len(headers) > 1
    for entry in vault.entries():
        if entry.key == headers[0].key:
            Path(entry.path).write_bytes(Path(entry.path).read_bytes() + b"!")
    with running(preset, tmp_path) as driver:
        assert driver.answer(longer) == cold
        check_index(memory_of(driver).index)


def test_what_lies_on_disk_is_read_while_others_decode(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=2048))
    long = prompt(1500, seed=1)
    with running(preset, tmp_path) as driver:
        cold = driver.answer(long, 4)
    with running(preset, tmp_path) as driver:
        busy = driver.submit(prompt(20), 400)
        driver.until(busy, TokenSampled)
        ask = driver.submit(long, 4)
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.tokens(ask) == cold
        driver.engine.cancel(busy)
        driver.finish(busy)


def test_d13_saved_time_is_zero_on_a_miss_and_grows_with_what_is_reused(one: Driver) -> None:
    long = prompt(900, seed=1)
    assert one.finish(one.submit(long, 4)).timings.saved_s == 0
    half = one.finish(one.submit(long[:512] + prompt(20, seed=2), 4)).timings
    whole = one.finish(one.submit(long + prompt(20, seed=3), 4)).timings
    assert whole.n_cached > half.n_cached > 0
    assert whole.saved_s > half.saved_s > 0


def test_d18_a_hit_copies_nothing_but_what_it_adds(one: Driver) -> None:
    """The slot's own KV stays where it is; what a step needs beyond it is mlx-lm's growth."""
    long = prompt(1500, seed=1)
    answer = one.answer(long, 8, slot=0)
    follow_up = (*long, *answer, *prompt(40, seed=2))
    before = array_bytes()
    growth = one.engine.loaded.loop.slot_kv.bytes_per_token
    one.answer(follow_up, 8, slot=0)
    grown = array_bytes() - before
    assert grown <= growth * (len(follow_up) + 8 - len(long) + 2 * STEP)
    assert grown < growth * len(long) / 2


def test_c17_others_decode_on_while_a_slot_is_saved(model_of: ModelOf, tmp_path: Path) -> None:
    may_sync = threading.Event()
    may_sync.set()

    class GatedDisk(Disk):
        def sync(self, fd: int) -> None:
            assert may_sync.wait(WAIT_S)
            super().sync(fd)

    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=2048))
    with running(preset, tmp_path, disk=GatedDisk()) as driver:
        driver.answer(prompt(900, seed=1), 4, slot=0)
        busy = driver.submit(prompt(20), 1900, slot=1)
        driver.until(busy, TokenSampled)
        may_sync.clear()
        saving = driver.engine.run_slot_command(SaveSlot(0, "a.bin"))
        n_before = len(driver.tokens(busy))
        driver.until(busy, TokenSampled, n_before + 20)
        assert not saving.done()
        may_sync.set()
        assert saving.result(timeout=PATIENCE_S).n_saved > 900
        driver.engine.cancel(busy)
        driver.finish(busy)


def test_invariants_hold_after_a_crowd(model_of: ModelOf, tmp_path: Path) -> None:
    from random import Random

    random = Random(3)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=1024))
    preset = with_cache(preset, memory_budget_pct=50)
    with running(preset, tmp_path, memory_bytes=6_000_000) as driver:
        asks = []
        for n in range(60):
            head = HEAD[: random.choice([0, 128, 200, 300])]
            tokens = head + prompt(random.randrange(2, 300), seed=n % 7)
            asks.append((driver.submit(tokens, 3, agent=f"{n % 5}"), tokens))
            if random.random() < 0.2:
                driver.engine.cancel(asks[-1][0])
        for ask, _ in asks:
            driver.finish(ask)
        check_index(memory_of(driver).index)
        for ask, tokens in random.sample(asks, 10):
            got = driver.tokens(ask)
            assert driver.cold(tokens, 3)[: len(got)] == got


@pytest.mark.parametrize("kind", ["tiny-swa", *in_soak("tiny")])
def test_z5_a_team_computes_its_head_once(model_of: ModelOf, tmp_path: Path, kind: str) -> None:
    preset = preset_of(model_of(kind), slots=SlotSpec(count=5, n_ctx=1536))
    head = prompt(1000, seed=1)
    tails = [prompt(40 + n, seed=10 + n) for n in range(5)]
    with running(preset, tmp_path) as driver:
        asks = [driver.submit(head + tail, 4, checkpoint_positions=(1000,)) for tail in tails]
        for ask in asks:
            driver.finish(ask)
        computed = driver.engine.snapshot().counters.n_prompt_tokens
        assert computed <= len(head) + sum(len(tail) + 128 for tail in tails)
        for ask, tail in zip(asks, tails, strict=True):
            assert driver.tokens(ask) == driver.cold(head + tail, 4)


def test_z5_when_the_first_of_a_team_leaves_the_next_one_computes(
    model_of: ModelOf, tmp_path: Path
) -> None:
    from mlxstack.core.engine_events import PrefillProgress
    from mlxstack.core.preset import PrefillSpec

    preset = preset_of(
        model_of("tiny"), slots=SlotSpec(count=3, n_ctx=2560), prefill=PrefillSpec(chunk_size=128)
    )
    head = prompt(2000, seed=1)
    with running(preset, tmp_path) as driver:
        first = driver.submit(head + prompt(5, seed=2), 4)
        driver.until(first, PrefillProgress)
        second = driver.submit(head + prompt(6, seed=3), 4)
        driver.engine.cancel(first)
        driver.finish(second)
        assert driver.tokens(second) == driver.cold(head + prompt(6, seed=3), 4)


def test_b18_a_prompt_that_can_never_fit_is_refused_with_the_numbers(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = with_cache(preset_of(model_of("tiny"), prefix_cache=NO_DISK), memory_budget_pct=50)
    with running(preset, tmp_path, memory_bytes=2_000_000) as driver:
        with pytest.raises(OutOfMemory, match="budget is 1000000"):
            driver.finish(driver.submit(prompt(900), 100))
        driver.answer(prompt(50), 4)


def test_e19_fewer_run_at_once_when_contexts_are_long(model_of: ModelOf, tmp_path: Path) -> None:
    from mlxstack.core.engine_events import RequestFinished, SlotAssigned

    preset = with_cache(preset_of(model_of("tiny"), prefix_cache=NO_DISK), memory_budget_pct=50)
    with running(preset, tmp_path, memory_bytes=6_000_000) as driver:
        asks = [driver.submit(prompt(700, seed=n), 40) for n in range(3)]
        for ask in asks:
            driver.finish(ask)
        order = [
            event
            for event in driver.listener.log
            if isinstance(event, SlotAssigned | RequestFinished)
        ]
        n_active = 0
        for event in order:
            n_active += 1 if isinstance(event, SlotAssigned) else -1
            assert n_active <= 1


def test_d10_a_head_that_three_conversations_share_is_learned(one: Driver) -> None:

    def learned() -> list[str]:
        view = one.engine.cache.stats().result(timeout=PATIENCE_S)
        return [p.name for p in view.prefixes if p.name.startswith("learned")]

    head = prompt(256, seed=1)
    for n in range(2):
        one.answer(head + prompt(60, seed=10 + n), 2, agent=f"agent-{n}")
        one.answer(prompt(150, seed=50 + n), 2)
    assert learned() == []
    one.answer(head + prompt(60, seed=20), 2, agent="agent-2")
    one.answer(prompt(150, seed=60), 2)
    assert len(learned()) == 1


def test_d10_one_conversation_that_grows_teaches_no_head(one: Driver) -> None:

    history = prompt(256, seed=1)
    for n in range(5):
        history += tuple(one.answer(history, 4)) + prompt(20, seed=n)
        one.answer(prompt(150, seed=50 + n), 2)
    view = one.engine.cache.stats().result(timeout=PATIENCE_S)
    assert not [p for p in view.prefixes if p.name.startswith("learned")]


@pytest.mark.parametrize("kind", ["tiny-swa", "tiny-hybrid", *in_soak("tiny")])
def test_d10_a_learned_head_survives_a_restart(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:

    preset = preset_of(model_of(kind), slots=ONE_SLOT)
    head = prompt(256, seed=1)
    with running(preset, tmp_path) as driver:
        for n in range(3):
            tokens = head + prompt(60, seed=10 + n)
            driver.answer(tokens, 2, agent=f"agent-{n}", checkpoint_positions=(256,))
        driver.catch_up()
    with running(preset, tmp_path) as driver:
        assert driver.engine.cache.shared_prefixes().result(timeout=PATIENCE_S) == (
            PromptTokens(head),
        )
        fourth = head + prompt(60, seed=77)
        ask = driver.submit(fourth, agent="agent-4", checkpoint_positions=(256,))
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 256
        assert driver.tokens(ask) == driver.cold(fourth)
        view = driver.engine.cache.stats().result(timeout=PATIENCE_S)
        assert [p for p in view.prefixes if p.name.startswith("learned-")]


def test_d10_a_note_that_cannot_be_read_costs_nothing(model_of: ModelOf, tmp_path: Path) -> None:

    preset = preset_of(model_of("tiny"), slots=ONE_SLOT)
    with running(preset, tmp_path) as driver:
        driver.engine.loaded.disk_tier._note(b'[{"key": "zz", "tokens": [1]}]')
        driver.catch_up()
    with running(preset, tmp_path) as driver:
        assert driver.engine.cache.shared_prefixes().result(timeout=PATIENCE_S) == ()
        driver.answer(HEAD)


def test_d10_the_heads_of_a_tenant_are_not_written_down(model_of: ModelOf, tmp_path: Path) -> None:

    preset = preset_of(model_of("tiny"), slots=ONE_SLOT)
    with running(preset, tmp_path) as driver:
        for n in range(3):
            tokens = HEAD + prompt(60, seed=n)
            driver.answer(tokens, 2, agent=f"agent-{n}", salt="secret")
        assert driver.engine.cache.shared_prefixes().result(timeout=PATIENCE_S) == ()


def test_d23_parked_kv_of_a_tenant_is_not_found_by_another(one: Driver) -> None:
    one.answer(HEAD, salt="one")
    one.answer(prompt(400, seed=9))
    other = one.submit(HEAD, salt="two")
    one.finish(other)
    assert one.seated(other).n_cached == 0
    one.answer(prompt(400, seed=9))
    same = one.submit(HEAD, salt="one")
    one.finish(same)
    assert one.seated(same).n_cached > 0
