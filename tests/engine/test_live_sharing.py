"""Live contexts share one copy of a common prefix: no answer shows it, for any kind of cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstack.core.commands import EraseSlot, RestoreSlot, SaveSlot
from mlxstack.core.engine_events import KVSource, RequestFinished, SlotAssigned, TokenSampled
from mlxstack.core.preset import DiskSpec, KVSpec, LiveSharingMode, PrefixCacheSpec, SlotSpec
from mlxstack.core.request import Request
from mlxstack.engine.decode.attention_costs import LENGTHS, measure_sharing
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import STEP, CacheFactory
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.engine.step import EngineLoop
from mlxstack.policy.kv.shared_prefixes import MIN_TOKENS, NO_SHARING, LiveSharing
from tests.conftest import ModelOf
from tests.engine.harness import Driver, array_bytes, preset_of, prompt, running
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

HEAD = prompt(300, seed=100)
OTHER = HEAD[:150] + prompt(200, seed=101)
NO_DISK = PrefixCacheSpec(memory_budget_pct=20, disk=DiskSpec(enabled=False))
FOUR = SlotSpec(count=4, n_ctx=1024)
FORCED = LiveSharing(block_size=16, min_tokens=32)
SHARING = ["tiny-8bit", "tiny-mla", "tiny-swa", "tiny-hybrid"]
MORE = in_soak("tiny", "tiny-sinks")
CUTTABLE = ("tiny", "tiny-8bit", "tiny-mla")


def kv_of(driver: Driver) -> SlotKVManager:
    return driver.engine._loop.slot_kv


def shared(driver: Driver) -> list[int]:
    """Tokens of the shared prefix of every slot."""
    return [context.n_shared for context in driver.engine._loop.slots]


@pytest.fixture(params=[*in_soak(*SHARING[:2]), *SHARING[2:], *MORE], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(
    kind: str, model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    kv = KVSpec(bits=8, group_size=32) if kind == "tiny-8bit" else KVSpec()
    model = model_of(kind.removesuffix("-8bit"))
    preset = preset_of(model, kv=kv, slots=FOUR, prefix_cache=NO_DISK)
    with running(preset, tmp_path_factory.mktemp(kind)) as one:
        assert one.engine._check.can_share
        kv_of(one).sharing = FORCED
        yield one


@pytest.fixture
def driver(engine: Driver) -> Driver:
    """The engine of this kind with nothing in it."""
    engine.engine._loop.batch.is_ahead = False
    forget(engine)
    return engine


def forget(driver: Driver) -> None:
    for slot in range(4):
        driver.engine.run_slot_command(EraseSlot(slot)).result(timeout=PATIENCE_S)
    driver.engine.cache.clear().result(timeout=PATIENCE_S)


@pytest.mark.parametrize("kind", [*SHARING, *MORE], indirect=True, scope="module")
def test_groups_form_grow_split_and_lose_members(driver: Driver, kind: str) -> None:
    """Answers of a group are those from cold and alone, at every change of the group."""
    cuts = (150, len(HEAD))
    prompts = [HEAD + prompt(20 + 7 * i, seed=i) for i in range(4)]
    apart = [OTHER, HEAD[:200] + prompt(9, seed=50)]
    cold = {tokens: driver.cold(tokens, 12) for tokens in (*prompts, *apart)}
    forget(driver)

    first = driver.submit(prompts[0], 60, checkpoint_positions=cuts)
    driver.until(first, object, 8)
    rest = [driver.submit(tokens, 12, checkpoint_positions=cuts) for tokens in prompts[1:]]
    for ask, tokens in zip(rest, prompts[1:], strict=True):
        driver.finish(ask)
        assert driver.tokens(ask) == cold[tokens]
    driver.finish(first)
    assert driver.tokens(first)[:12] == cold[prompts[0]]
    assert shared(driver) == [288] * 4
    assert len({id(context.prefix) for context in driver.engine._loop.slots}) == 1

    for tokens in apart:
        ask = driver.submit(tokens, 12, slot=1, checkpoint_positions=cuts)
        driver.finish(ask)
        assert driver.tokens(ask) == cold[tokens]
    assert shared(driver)[1] == (192 if kind in CUTTABLE else 144)
    again = [driver.submit(tokens, 12, checkpoint_positions=cuts) for tokens in (*apart, *prompts)]
    for ask, tokens in zip(again, (*apart, *prompts), strict=True):
        driver.finish(ask)
        assert driver.tokens(ask) == cold[tokens]


@pytest.mark.parametrize("kind", [*SHARING, *MORE], indirect=True, scope="module")
def test_a_shared_prefix_counts_once_and_goes_with_its_last_holder(driver: Driver) -> None:
    for i in range(4):
        driver.answer(HEAD + prompt(20, seed=i), 2, slot=i, checkpoint_positions=(len(HEAD),))
    manager, slots = kv_of(driver), driver.engine._loop.slots
    per_token = manager.bytes_per_token
    assert manager.shared_bytes == 288 * per_token
    own = sum(context.cache_bytes for context in slots)
    assert manager.live_bytes >= own + manager.shared_bytes
    assert all(context.cache_bytes <= 512 * per_token + context.n_bytes for context in slots)
    full = sum(context.cache_bytes for context in slots) + manager.shared_bytes
    for i in range(4):
        assert manager.shared_bytes == 288 * per_token
        driver.engine.run_slot_command(EraseSlot(i)).result(timeout=PATIENCE_S)
    assert manager.shared_bytes == 0 < full


def test_tenants_share_no_prefix(driver: Driver) -> None:
    cuts, yours = (len(HEAD),), HEAD + prompt(20, seed=2)
    driver.answer(yours, 2, slot=1, salt="b", checkpoint_positions=cuts)
    driver.answer(prompt(200, seed=9), 2, slot=1)
    driver.answer(HEAD + prompt(20, seed=1), 2, slot=0, salt="a", checkpoint_positions=cuts)
    ask = driver.submit(yours + prompt(5, seed=3), 2, slot=1, salt="b")
    driver.finish(ask)
    assert driver.seated(ask).n_cached >= len(HEAD)
    assert shared(driver) == [0, 0, 0, 0]


def test_parked_and_resumed_beside_a_group(driver: Driver) -> None:
    cuts = (len(HEAD),)
    mine, yours = HEAD + prompt(40, seed=1), HEAD + prompt(40, seed=2)
    history = mine + tuple(driver.answer(mine, 12, slot=0, checkpoint_positions=cuts))
    driver.answer(yours, 12, slot=1, checkpoint_positions=cuts)
    assert shared(driver)[:2] == [288, 288]
    driver.answer(prompt(200, seed=9), 2, slot=0)
    assert shared(driver)[:2] == [0, 288]
    turn = history + prompt(10, seed=3)
    ask = driver.submit(turn, 12, slot=2)
    driver.finish(ask)
    assert driver.seated(ask).n_cached >= len(mine) - 1
    assert shared(driver)[2] == 288
    driver.engine.cache.clear().result(timeout=PATIENCE_S)
    more = turn + tuple(driver.tokens(ask)) + prompt(10, seed=4)
    found = driver.answer(more, 12, slot=2)
    assert driver.tokens(ask) == driver.cold(turn, 12, slot=3)
    assert found == driver.cold(more, 12, slot=3)


def test_saved_and_restored_into_a_group(driver: Driver) -> None:
    cuts = (len(HEAD),)
    mine, yours = HEAD + prompt(40, seed=1), HEAD + prompt(40, seed=2)
    history = mine + tuple(driver.answer(mine, 12, slot=0, checkpoint_positions=cuts))
    driver.answer(yours, 12, slot=1, checkpoint_positions=cuts)
    driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
    driver.engine.run_slot_command(EraseSlot(0)).result(timeout=PATIENCE_S)
    driver.engine.run_slot_command(RestoreSlot(2, "a.bin")).result(timeout=PATIENCE_S)
    assert shared(driver) == [0, 288, 288, 0]
    turn = history + prompt(10, seed=3)
    ask = driver.submit(turn, 12, slot=2)
    driver.finish(ask)
    assert driver.tokens(ask) == driver.cold(turn, 12, slot=3)
    assert driver.answer(yours, 12, slot=1) == driver.cold(yours, 12, slot=3)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_answer_that_is_shared_in_its_middle_keeps_its_tokens(
    driver: Driver, is_ahead: bool
) -> None:
    """Attention changes from one product per row to one for the group, and back."""
    driver.engine._loop.batch.is_ahead = is_ahead
    mine = HEAD + prompt(30, seed=1)
    cold = driver.cold(mine, 100, slot=3)
    driver.engine.run_slot_command(EraseSlot(3)).result(timeout=PATIENCE_S)
    ask = driver.submit(mine, 100, slot=0, checkpoint_positions=(len(HEAD),))
    driver.until(ask, object, 10)
    for i in range(2):
        driver.answer(HEAD + prompt(30, seed=5 + i), 4, slot=1 + i)
        driver.engine.run_slot_command(EraseSlot(1 + i)).result(timeout=PATIENCE_S)
    driver.finish(ask)
    assert shared(driver)[0] == 288
    assert driver.tokens(ask) == cold


@pytest.mark.parametrize("name", ["later", "off"])
def test_kinds_that_do_not_share_copy_as_before(
    name: str, model_of: ModelOf, tmp_path: Path
) -> None:
    kv = KVSpec(bits=8, group_size=32, quantized_start=64) if name == "later" else KVSpec()
    mode = LiveSharingMode.OFF if name == "off" else LiveSharingMode.AUTO
    cache = PrefixCacheSpec(memory_budget_pct=20, live_sharing=mode)
    with running(
        preset_of(model_of("tiny"), kv=kv, slots=FOUR, prefix_cache=cache), tmp_path
    ) as driver:
        assert driver.engine._check.can_share == (name == "off")
        assert kv_of(driver).sharing == NO_SHARING
        for i in range(2):
            tokens = HEAD + prompt(20, seed=i)
            assert driver.answer(tokens, 4, slot=i) == driver.cold(tokens, 4, slot=2)
        assert shared(driver) == [0] * 4


@pytest.mark.parametrize("mode", LiveSharingMode)
def test_a_shared_prefix_is_admitted_once(
    mode: LiveSharingMode, model_of: ModelOf, tmp_path: Path
) -> None:
    """Of four contexts of 1,024 tokens the budget holds two and a half, or one and four tails."""
    budget = 5 << 20
    cache = PrefixCacheSpec(memory_budget_pct=50, live_sharing=mode, disk=DiskSpec(enabled=False))
    preset = preset_of(model_of("tiny"), slots=FOUR, prefix_cache=cache)
    head = prompt(900, seed=7)
    prompts = [head + prompt(20, seed=i) for i in range(4)]
    with running(preset, tmp_path, memory_bytes=2 * budget) as driver:
        if mode is LiveSharingMode.AUTO:
            kv_of(driver).sharing = FORCED
        asks = [driver.submit(prompts[0], 80)]
        driver.until(asks[0], TokenSampled, 2)
        asks += [driver.submit(tokens, 80) for tokens in prompts[1:]]
        most = 0
        for ask in asks:
            driver.seated(ask)
            n_bytes = driver.engine._do(lambda loop: loop.slot_kv.live_bytes).result(
                timeout=PATIENCE_S
            )
            most = max(most, n_bytes)
        for ask in asks:
            driver.finish(ask)
        n_active, n_together = 0, 0
        for event in driver.listener.log:
            n_active += isinstance(event, SlotAssigned) - isinstance(event, RequestFinished)
            n_together = max(n_together, n_active)
        answers = [driver.tokens(ask)[:12] for ask in asks]
        assert n_together == (4 if mode is LiveSharingMode.AUTO else 2)
        assert most <= budget
        assert answers[3] == driver.cold(prompts[3], 12)


def fill(loop: EngineLoop, slot: int, tokens: tuple[int, ...]) -> None:
    """Let the slot hold these tokens with random KV, without a prefill."""
    context = loop.slots[slot]
    context.clear()
    shape = (1, 2, len(tokens), 32)
    for leaf in context.leaves:
        leaf.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    context.extend(tokens)
    context.evaluate()


def copied(work: Callable[[], object]) -> int:
    """Bytes by which MLX's memory grew at most meanwhile."""
    mx.synchronize()
    before = array_bytes()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return int(mx.get_peak_memory() - before)


def kv_arrays(context: SlotContext) -> list[mx.array]:
    return [part for leaf in context.leaves for part in cache_adapters.span(leaf, 0, len(context))]


@pytest.mark.parametrize("n_head", [1024, 4096, 16384])
def test_forks_parks_and_resumes_copy_their_tail_alone(
    model_of: ModelOf, tmp_path: Path, n_head: int
) -> None:
    n_own, head = 40, prompt(n_head, seed=7)
    first, *others = (head + prompt(n_own, seed=i) for i in range(3))
    preset = preset_of(model_of("tiny"), slots=SlotSpec(3, 17000), prefix_cache=NO_DISK)

    def prepare(loop: EngineLoop, slot: int, tokens: tuple[int, ...]) -> tuple[KVSource, int]:
        kv, request = loop.slot_kv, Request("x", tokens, 1, arrived=0.0)
        plan, _ = kv.plan(request, slot, may_read=False)
        return plan.source, copied(lambda: kv.prepare_slot(request, slot, plan))

    def play(loop: EngineLoop) -> None:
        kv, slots = loop.slot_kv, loop.slots
        kv.sharing = LiveSharing(min_tokens=1024)
        # A cache grows by a step, for which zeros are joined.
        tail = (2 * STEP + 128) * kv.bytes_per_token
        fill(loop, 0, first)
        source, n_bytes = prepare(loop, 1, others[0])
        assert (source, n_bytes < 1.4 * tail) == (KVSource.FORK, True)
        source, n_bytes = prepare(loop, 2, others[1])
        assert (source, n_bytes < tail) == (KVSource.FORK, True)
        assert [context.n_shared for context in slots] == [n_head] * 3
        assert copied(lambda: kv.park(slots[0])) < tail
        before = kv_arrays(slots[0])
        mx.eval(before)
        for context in slots:
            context.clear()
        assert kv.shared_bytes == 0 < n_head * kv.bytes_per_token <= kv.prefix_cache.n_bytes
        source, n_bytes = prepare(loop, 1, (*first, 1))
        assert (source, n_bytes < tail) == (KVSource.PARKED, True)
        assert slots[1].n_shared == n_head
        assert kv.prefix_cache.n_bytes < tail < kv.shared_bytes
        each = zip(before, kv_arrays(slots[1]), strict=True)
        assert all(mx.array_equal(one, other) for one, other in each)

    with running(preset, tmp_path) as driver:
        driver.engine._do(play).result(timeout=PATIENCE_S)


def test_auto_measures_from_which_length_on_sharing_pays(model_of: ModelOf, tmp_path: Path) -> None:
    cache = PrefixCacheSpec(block_size=64, live_sharing=LiveSharingMode.AUTO)
    with running(preset_of(model_of("tiny"), prefix_cache=cache), tmp_path) as driver:
        sharing = kv_of(driver).sharing
        assert sharing.block_size == 64
        assert sharing.min_tokens is None or sharing.min_tokens >= MIN_TOKENS
        runner = driver.engine._loop.batch.runner
        cache_factory = CacheFactory(runner.model, KVSpec())
        curve = driver.engine._do(lambda _: measure_sharing(runner, cache_factory)).result(
            timeout=PATIENCE_S
        )
    assert [costs.n_tokens for costs in curve] == list(LENGTHS)
    assert all(costs.apart_s > 0 < costs.together_s for costs in curve)
