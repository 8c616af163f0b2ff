"""Whatever was reused, and from where: the answer is the one from cold, for every kind of cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.engine_events import KVSource
from mlxstack.core.preset import DiskSpec, KVSpec, PrefixCacheSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.models import build
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

KINDS = ["tiny-swa", "tiny-sinks", "tiny-hybrid", "tiny-later"]
MORE_KINDS = in_soak("tiny", "tiny-mla", "tiny-8bit")
PRECISIONS = {
    "tiny-8bit": KVSpec(bits=8, group_size=32),
    "tiny-later": KVSpec(bits=4, group_size=32, quantized_start=100),
}
HEAD = prompt(256, seed=100)
MINE = HEAD + prompt(70, seed=1)
NEXT = prompt(25, seed=3)
ONE = SlotSpec(count=1, n_ctx=1024)
TWO = SlotSpec(count=2, n_ctx=1024)
NO_DISK = PrefixCacheSpec(memory_budget_pct=20, disk=DiskSpec(enabled=False))


@pytest.fixture(params=[*KINDS, *MORE_KINDS])
def preset(request: pytest.FixtureRequest, model_of: ModelOf) -> Preset:
    kv = PRECISIONS.get(request.param)
    return preset_of(model_of("tiny" if kv else request.param), kv=kv or KVSpec(), slots=TWO)


@pytest.fixture
def small(model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    """One slot, no disk."""
    slots = SlotSpec(count=1, n_ctx=1024)
    with running(preset_of(model_of("tiny"), slots=slots, prefix_cache=NO_DISK), tmp_path) as one:
        yield one


def reason(driver: Driver, tokens: tuple[int, ...], **more: object) -> str | None:
    ask = driver.submit(tokens, 2, **more)
    driver.finish(ask)
    miss = driver.seated(ask).miss
    return None if miss is None else str(miss.reason)


def test_d1_d3_the_next_turn_and_a_fork_go_on_as_if_alone(preset: Preset, tmp_path: Path) -> None:
    with running(preset, tmp_path) as driver:
        history = MINE + tuple(driver.answer(MINE, slot=0, checkpoint_positions=(256,)))
        ask = driver.submit(history + NEXT, slot=0)
        driver.finish(ask)
        seated = driver.seated(ask)
        assert seated.source is KVSource.SLOT
        assert seated.n_cached >= len(MINE)
        assert driver.tokens(ask) == driver.cold(history + NEXT, slot=1)
        fork = driver.submit(HEAD + NEXT, slot=1, checkpoint_positions=(256,))
        driver.finish(fork)
        assert driver.seated(fork).n_cached == 256
        assert driver.tokens(fork) == driver.cold(HEAD + NEXT, slot=0)


@pytest.mark.parametrize("kind", ["tiny-swa", "tiny-hybrid", *in_soak("tiny", "tiny-sinks")])
def test_c4_c6_a_slot_restored_elsewhere_after_a_restart_loses_no_token(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    preset = preset_of(model_of(kind), prefix_cache=NO_DISK)
    with running(preset, tmp_path) as driver:
        driver.answer(MINE, slot=0)
        saved = driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
        history = driver.context(0)
    with running(preset, tmp_path) as driver:
        restored = driver.engine.run_slot_command(RestoreSlot(2, "a.bin")).result(
            timeout=PATIENCE_S
        )
        assert restored.n_restored == saved.n_saved == len(history)  # type: ignore[union-attr]
        ask = driver.submit(history + NEXT, slot=2)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == len(history)
        assert driver.tokens(ask) == driver.cold(history + NEXT, slot=1)


@pytest.mark.parametrize("kind", ["tiny-swa", *in_soak("tiny", "tiny-hybrid")])
def test_d7_what_is_decoding_is_not_evicted(model_of: ModelOf, tmp_path: Path, kind: str) -> None:
    preset = preset_of(model_of(kind), slots=TWO, prefix_cache=NO_DISK)
    with running(preset, tmp_path / "alone") as driver:
        expected = driver.cold(MINE, 80)
    with running(preset, tmp_path, memory_bytes=20_000_000) as driver:
        driver.answer(MINE, 2, slot=0, checkpoint_positions=(256,))
        long = driver.submit(MINE, 80, slot=1)
        for n in range(8):
            driver.answer(prompt(300, seed=n), 2, slot=0)
            driver.engine.cache.clear().result(timeout=PATIENCE_S)
        driver.finish(long)
        assert driver.tokens(long) == expected


def test_d8_under_pressure_cold_kv_goes_and_pinned_kv_stays(small: Driver) -> None:
    small.answer(HEAD, 2)
    small.engine.cache.pin("kept", PromptTokens(HEAD)).result(timeout=PATIENCE_S)
    for n in range(3):
        small.answer(prompt(300, seed=n), 2)
    before = small.engine.cache.stats().result(timeout=PATIENCE_S)
    freed = small.engine.cache.reclaim(1).result(timeout=PATIENCE_S)
    after = small.engine.cache.stats().result(timeout=PATIENCE_S)
    assert freed.n_bytes > 0
    assert after.memory_bytes == before.memory_bytes - freed.n_bytes
    assert [p.name for p in after.prefixes if p.is_pinned] == ["kept"]
    ask = small.submit(HEAD + NEXT, 2)
    small.finish(ask)
    assert small.seated(ask).n_cached == 256


@pytest.mark.parametrize("kind", ["tiny-swa", "tiny-hybrid"])
def test_d8_a_pin_holds_the_checkpoint_that_it_takes(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    def is_kept(tail: tuple[int, ...]) -> bool:
        driver.answer(prompt(300, seed=8), 2)
        driver.engine.cache.reclaim(1).result(timeout=PATIENCE_S)
        ask = driver.submit(HEAD + tail, 2)
        driver.finish(ask)
        assert driver.tokens(ask) == driver.cold(HEAD + tail, 2)
        return driver.seated(ask).n_cached == pinned.n_tokens == 255

    preset = preset_of(model_of(kind), slots=ONE, prefix_cache=NO_DISK)
    with running(preset, tmp_path) as driver:
        driver.answer(HEAD, 2, checkpoint_positions=(255,))
        pinned = driver.engine.cache.pin("kept", PromptTokens(HEAD)).result(timeout=PATIENCE_S)
        assert is_kept(prompt(25, seed=3))
        (shown,) = driver.engine.cache.stats().result(timeout=PATIENCE_S).prefixes
        assert (shown.name, shown.n_hits) == ("kept", 1)
        driver.engine.cache.pin_known("again", "kept").result(timeout=PATIENCE_S)
        driver.engine.cache.unpin("kept").result(timeout=PATIENCE_S)
        assert is_kept(prompt(25, seed=4))


@pytest.mark.parametrize("kind", ["tiny-swa", "tiny-hybrid"])
def test_d10_a_learned_head_keeps_its_checkpoint(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    preset = preset_of(model_of(kind), slots=ONE, prefix_cache=NO_DISK)
    with running(preset, tmp_path) as driver:
        for n in range(4):
            driver.answer(
                HEAD + prompt(60, seed=10 + n), 2, agent=f"agent-{n}", checkpoint_positions=(256,)
            )
        driver.answer(prompt(300, seed=8), 2)
        driver.engine.cache.reclaim(1).result(timeout=PATIENCE_S)
        ask = driver.submit(HEAD + NEXT, 2)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 256


def test_d4_the_budget_is_a_share_of_the_memory(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), prefix_cache=NO_DISK)
    with running(preset, tmp_path, memory_bytes=64 * 2**30) as driver:
        view = driver.engine.cache.stats().result(timeout=PATIENCE_S)
        assert view.memory_budget == int(12.8 * 2**30)


def test_d16_an_eviction_is_told_and_a_partial_block_is_no_miss(small: Driver) -> None:
    small.answer(HEAD, 2, agent="a")
    small.answer(prompt(300, seed=2), 2, agent="b")
    small.engine.cache.clear().result(timeout=PATIENCE_S)
    assert reason(small, HEAD, agent="a") == "evicted"
    small.answer(prompt(300, seed=3), 2, agent="b")
    assert reason(small, HEAD + NEXT, agent="a") is None
    small.answer(MINE, 2, agent="a")
    small.answer(prompt(300, seed=3), 2, agent="b")
    # The kept KV ends behind the answer, inside a block; the answer did not come back.
    assert reason(small, MINE + NEXT, agent="a") is None


def test_d16_a_missing_checkpoint_is_told(model_of: ModelOf, tmp_path: Path) -> None:
    slots = SlotSpec(count=1, n_ctx=1024)
    with running(preset_of(model_of("tiny-swa"), slots=slots), tmp_path) as driver:
        driver.answer(MINE, 2, agent="a")
        assert reason(driver, HEAD + prompt(40, seed=9), agent="b") == "no checkpoint"


def test_d17_another_model_never_hits_and_the_first_one_is_found_again(
    model_of: ModelOf, tmp_path: Path
) -> None:
    first = preset_of(model_of("tiny"), slots=TWO)
    second = preset_of(build(tmp_path / "other", "tiny", seed=9), slots=TWO)
    with running(first, tmp_path) as driver:
        expected = driver.answer(MINE)
    with running(second, tmp_path) as driver:
        ask = driver.submit(MINE)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 0
        assert driver.tokens(ask) == driver.cold(MINE)
    with running(first, tmp_path) as driver:
        ask = driver.submit(MINE)
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.tokens(ask) == expected


def test_g10_a_branch_that_left_a_segment_on_disk_does_not_overwrite_it(
    model_of: ModelOf, tmp_path: Path
) -> None:
    slots = SlotSpec(count=1, n_ctx=1024)
    mine = HEAD[:200] + prompt(100, seed=1)
    yours = HEAD[:200] + prompt(200, seed=2)
    with running(preset_of(model_of("tiny"), slots=slots), tmp_path) as driver:
        driver.answer(mine, agent="a")
        driver.catch_up()
    with running(preset_of(model_of("tiny"), slots=slots), tmp_path) as driver:
        driver.answer(yours, agent="b")
        driver.catch_up()
        driver.engine.cache.clear().result(timeout=PATIENCE_S)
        driver.engine.cache.clear().result(timeout=PATIENCE_S)
        driver.answer(prompt(300, seed=3), agent="c")
        history = mine + NEXT
        ask = driver.submit(history, agent="a")
        driver.finish(ask)
        assert driver.seated(ask).n_cached >= 256
        assert driver.tokens(ask) == driver.cold(history)
