"""KV budget and admission on a device with a working set: beyond it the GPU fails all rows."""

from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from mlxstack.core.commands import EraseSlot
from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.errors import OutOfMemory, SetupError
from mlxstack.core.preset import PrefixCacheSpec, Preset, SlotSpec
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.host.hardware import (
    CPU_VARIABLE,
    MAX_BUFFER_CACHE_BYTES,
    MIN_WORKSPACE_BYTES,
    MemoryBudget,
    buffer_cache_limit,
    mac_memory,
    mac_share,
    memory_limit,
    this_memory,
)
from mlxstack.planner.candidate import of_preset
from mlxstack.policy.memory import capacity
from mlxstack.policy.memory.capacity import MARGIN_BYTES, kv_budget, need
from mlxstack.policy.scheduling.chunked_prefill import tokens_within_scores
from tests.conftest import ModelOf
from tests.engine.harness import array_bytes, preset_of, prompt, running
from tests.models import LLAMA, SLIDING
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.mlx

MIB = 2**20
GIB = 2**30
GREEDY = PrefixCacheSpec(memory_budget_pct=90)
NO_LIMIT = 2**50
FIFTH = PrefixCacheSpec(memory_budget_pct=20)


def have_working_set(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """MLX reports this working set. Its limits are recorded nowhere and change nothing.

    An engine that ends late restores the limit that was there before: none.
    """
    facts = {"device_name": "M", "max_recommended_working_set_size": n_bytes}
    monkeypatch.setattr(mx, "device_info", lambda *_: facts)
    for name in ("set_wired_limit", "set_memory_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda _: NO_LIMIT)


def gpu(working_set: int) -> MemoryBudget:
    """Budget of a GPU for a plan."""
    return MemoryBudget(0, memory_limit(working_set), 2, "a GPU", working_set)


def budget_of(preset: Preset, home: Path) -> int:
    """What the engine gives to KV, as others see it."""
    with running(preset, home) as driver:
        budget = driver.engine.snapshot().kv_budget_bytes
        assert budget == driver.engine.loaded.loop.slot_kv.prefix_cache.budget
        assert budget == driver.engine.loaded.loop._limits.max_bytes
    return budget


def test_the_budget_is_what_the_planner_leaves_for_kv(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = preset_of(model_of("tiny"), prefix_cache=GREEDY)
    working_set = 512 * MIB
    have_working_set(monkeypatch, working_set)
    planned = need(of_preset(preset).load(gpu(working_set)))
    kv = planned.kv_full + planned.kv_state
    assert budget_of(preset, tmp_path) == memory_limit(working_set) - (planned.total - kv)


def test_a_share_that_the_device_has_stays_the_share(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = preset_of(model_of("tiny"), prefix_cache=FIFTH)
    have_working_set(monkeypatch, 100 * 1024 * GIB)
    total = psutil.virtual_memory().total
    assert budget_of(preset, tmp_path) == int(total * 0.2)


def test_a_cpu_divides_all_memory(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), prefix_cache=FIFTH)
    assert budget_of(preset, tmp_path) == int(psutil.virtual_memory().total * 0.2)


def test_auto_is_what_weights_and_workspace_leave(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = preset_of(model_of("tiny"))
    memory = this_memory({})
    load = of_preset(preset).load(memory)
    left = kv_budget(memory.usable, load.weights, load.workspace)
    assert budget_of(preset, tmp_path / "cpu") == left
    have_working_set(monkeypatch, 512 * MIB)
    load = of_preset(preset).load(gpu(512 * MIB))
    planned = need(load)
    assert budget_of(preset, tmp_path / "gpu") == memory_limit(512 * MIB) - (
        load.weights + planned.workspace + MARGIN_BYTES
    )


def test_an_imagined_memory_reaches_the_engine(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", "1GiB")
    preset = preset_of(model_of("tiny"), prefix_cache=GREEDY)
    assert budget_of(preset, tmp_path / "cpu") == int(0.9 * GIB)
    have_working_set(monkeypatch, 64 * GIB)
    planned = need(of_preset(preset).load(gpu(mac_share(GIB))))
    kv = planned.kv_full + planned.kv_state
    left = memory_limit(mac_share(GIB)) - (planned.total - kv)
    assert budget_of(preset, tmp_path / "gpu") == left


def test_planner_and_engine_leave_the_same_room_for_freed_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mac = mac_memory("64GB")
    assert mac.usable == memory_limit(48 * GIB)
    assert buffer_cache_limit(96 * GIB) == MAX_BUFFER_CACHE_BYTES
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delenv(CPU_VARIABLE)
    assert this_memory({"MLX_STACK_MEMORY": "64GB"}).usable == mac.usable


@pytest.mark.parametrize("n_gib", [5, 11, 48, 96, 400])
def test_what_stays_is_below_the_line_at_which_mlx_empties_its_cache(n_gib: int) -> None:
    """Arrays but for 1 GiB of workspace, which only a prefill takes."""
    working_set = n_gib * GIB
    staying = memory_limit(working_set) - MIN_WORKSPACE_BYTES
    assert staying < 0.95 * working_set
    assert memory_limit(working_set) <= working_set - buffer_cache_limit(working_set)
    if n_gib >= 48:
        assert 0.93 * working_set < staying


def test_weights_that_leave_no_room_for_kv_are_refused(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, MARGIN_BYTES)
    with (
        pytest.raises(SetupError, match=r"of weights and needs .* lower prefill\.chunk_size"),
        running(preset_of(model_of("tiny")), tmp_path),
    ):
        pass


def test_a_prompt_is_refused_while_the_device_is_full_and_served_later(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, 512 * MIB)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=8192))
    with running(preset, tmp_path) as driver:
        seating = driver.engine.loaded.loop.slot_kv
        cold = driver.cold(prompt(1000), 4)
        running_one = driver.submit(prompt(30, seed=1), 4000, slot=1)
        driver.answer(prompt(10, seed=2), 2, slot=0)
        driver.engine.cache.clear().result(PATIENCE_S)
        left = seating.array_limit - array_bytes()
        # The running answer grows meanwhile, which needs room; half a prompt is enough for it.
        ballast = mx.zeros((left - 500 * seating.bytes_per_token,), mx.uint8)
        mx.eval(ballast)
        with pytest.raises(OutOfMemory, match="the device has room for are in use"):
            driver.finish(driver.submit(prompt(1000), 4, slot=0))
        del ballast
        assert driver.answer(prompt(1000), 4, slot=0) == cold
        driver.engine.cancel(running_one)
        driver.finish(running_one)


def test_of_two_prompts_that_were_assigned_together_the_device_gets_what_fits(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, 512 * MIB)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=8192))
    with running(preset, tmp_path) as driver:
        slot_kv = driver.engine.loaded.loop.slot_kv
        prompts = (prompt(1200), prompt(1200, seed=1))
        cold = [driver.cold(tokens, 4) for tokens in prompts]
        driver.engine.cache.clear().result(PATIENCE_S)
        for slot in range(2):
            driver.engine.run_slot_command(EraseSlot(slot)).result(PATIENCE_S)
        driver.catch_up()
        slot_kv.array_limit = array_bytes() + 2000 * slot_kv.bytes_per_token
        asks = [driver.submit(tokens, 4, slot=n) for n, tokens in enumerate(prompts)]
        served = 0
        for ask, alone in zip(asks, cold, strict=True):
            try:
                driver.finish(ask)
            except OutOfMemory as error:
                assert "the device has room for are in use" in str(error)
            else:
                served += 1
                assert driver.tokens(ask) == alone
        assert served == 1


def test_room_that_is_promised_to_a_prompt_is_not_given_to_another(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, 512 * MIB)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=4096))
    with running(preset, tmp_path) as driver:
        slot_kv = driver.engine.loaded.loop.slot_kv
        cold = driver.cold(prompt(500), 4)
        driver.answer(prompt(20, seed=1), 2, slot=1)
        driver.catch_up()
        slot_kv.slots[1].n_unreserved = slot_kv.array_limit - array_bytes()
        with pytest.raises(OutOfMemory, match="the device has room for are in use"):
            driver.answer(prompt(500), 4, slot=0)
        driver.engine.run_slot_command(EraseSlot(1)).result(PATIENCE_S)
        assert driver.answer(prompt(500), 4, slot=0) == cold


def test_an_answer_that_outgrows_the_device_fails_alone(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, 512 * MIB)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=2, n_ctx=8192))
    with running(preset, tmp_path) as driver:
        slot_kv = driver.engine.loaded.loop.slot_kv
        long = driver.submit(prompt(100), 6000, slot=0)
        driver.until(long, TokenSampled, 40)
        slot_kv.array_limit = array_bytes() + 400 * slot_kv.bytes_per_token
        with pytest.raises(OutOfMemory, match="the device has room for are in use"):
            driver.finish(long)
        assert len(driver.tokens(long)) < 1000
        assert driver.context(0) == ()
        slot_kv.array_limit = 512 * MIB
        assert driver.answer(prompt(90), 8, slot=0) == driver.cold(prompt(90), 8, slot=1)


def test_parked_kv_gives_way_to_a_prompt_when_the_device_is_full(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, 512 * MIB)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=8192))
    with running(preset, tmp_path) as driver:
        seating = driver.engine.loaded.loop.slot_kv
        cold = driver.cold(prompt(800), 4)
        for n in range(4):
            driver.answer(prompt(800, seed=n + 1), 4)
        driver.catch_up()
        assert seating.prefix_cache.index.memory_bytes > 3 * 800 * seating.bytes_per_token
        seating.array_limit = array_bytes() + 200 * seating.bytes_per_token
        assert driver.answer(prompt(800), 4) == cold
        assert seating.prefix_cache.index.memory_bytes < 3 * 800 * seating.bytes_per_token


def test_a_refused_prompt_leaves_the_context_of_another_conversation(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=1024))
    with running(preset, tmp_path) as driver:
        driver.answer(prompt(800), 4, agent="on disk")
    with running(preset, tmp_path) as driver:
        slot_kv = driver.engine.loaded.loop.slot_kv
        driver.answer(prompt(300, seed=1), 4, display_name="idle")
        before = driver.context(0)
        slot_kv.array_limit = array_bytes() + 10 * slot_kv.bytes_per_token
        with pytest.raises(OutOfMemory):
            driver.answer((*prompt(800), *prompt(9, seed=2)), 4, agent="on disk")
        slot_kv.array_limit = 0
        assert driver.context(0) == before
        again = (*prompt(300, seed=1), *prompt(5, seed=3))
        ask = driver.submit(again, 4, display_name="idle")
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 300
        assert driver.tokens(ask) == driver.cold(again, 4)


def test_scores_of_unfused_attention_bound_the_chunk(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_working_set(monkeypatch, 8 * GIB)
    for kind in ("tiny", "tiny-mla"):
        with running(preset_of(model_of(kind)), tmp_path / kind) as driver:
            policy = driver.engine.loaded.loop._limits.prefill
            n_heads = 4
            copies = capacity.SCORE_COPIES
            assert policy.score_bytes == n_heads * 2 * copies
            assert tokens_within_scores(500_000, policy) < 200


def test_attention_is_fused_for_some_head_dims_and_16_bit_kv() -> None:
    fused = shape_of_config(LLAMA | {"head_dim": 128})
    assert capacity.score_bytes(fused, 16) == 0
    assert capacity.score_bytes(shape_of_config(LLAMA | {"head_dim": 96}), 16) == 0
    assert capacity.score_bytes(fused, 8) == 4 * 2 * capacity.SCORE_COPIES
    gemma = shape_of_config(SLIDING | {"head_dim": 256})
    assert capacity.score_bytes(gemma, 16) == 4 * 2 * capacity.SCORE_COPIES
