"""Conversations that go back several turns, on caches that can be cut at checkpoints only."""

import logging
from pathlib import Path

import pytest

from mlxstack.core.errors import Broken
from mlxstack.core.preset import DiskSpec, PrefixCacheSpec, Preset, SlotSpec
from mlxstack.engine.kv.slot_context import MAX_CHECKPOINTS
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.repetition import in_soak

CACHES = {
    "disk": PrefixCacheSpec(),
    "memory": PrefixCacheSpec(disk=DiskSpec(enabled=False)),
    "none": PrefixCacheSpec(enabled=False),
}


def preset_for(model: Path, cache: PrefixCacheSpec) -> Preset:
    return preset_of(model, slots=SlotSpec(count=1, n_ctx=4096), prefix_cache=cache)


def fill_checkpoints(driver: Driver) -> list[int]:
    """One conversation with a checkpoint per turn, until its slot keeps no more of them."""
    tokens = prompt(140, seed=1)
    cuts = [139]
    context = driver.engine.loaded.loop.slots[0]
    for turn in range(2 * MAX_CHECKPOINTS):
        ask = driver.submit(tokens, 4, checkpoint_positions=tuple(cuts))
        driver.finish(ask)
        if len(context.checkpoints) == MAX_CHECKPOINTS:
            break
        tokens += tuple(driver.tokens(ask)) + prompt(60, seed=10 + turn)
        cuts.append(len(tokens) - 5)
    return [checkpoint.position for checkpoint in context.checkpoints]


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("kind", "at", "cache"),
    [
        ("tiny-swa", 1, "disk"),
        ("tiny-swa", 1, "none"),
        ("tiny-swa", 0, "memory"),
        ("tiny-swa", 2, "memory"),
        ("tiny-hybrid", 1, "disk"),
        *in_soak(("tiny-swa", 1, "memory"), ("tiny-sinks", 1, "memory")),
    ],
)
def test_a_conversation_goes_back_to_each_checkpoint_it_has(
    model_of: ModelOf, tmp_path: Path, kind: str, at: int, cache: str
) -> None:
    with running(preset_for(model_of(kind), CACHES[cache]), tmp_path) as driver:
        positions = fill_checkpoints(driver)
        assert len(positions) == MAX_CHECKPOINTS
        back = driver.context(0)[: positions[at]] + prompt(20, seed=99)
        ask = driver.submit(back, 8)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == positions[at]
        assert driver.tokens(ask) == driver.cold(back, 8)


@pytest.mark.mlx
def test_a_request_that_breaks_leaves_a_traceback_in_the_log(
    model_of: ModelOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running(preset_of(model_of("tiny")), tmp_path) as driver,
        caplog.at_level(logging.ERROR, "mlxstack.engine"),
    ):
        with pytest.raises(Broken):
            driver.finish(driver.submit((1.5,) * 20, 5, request_id="req-7"))  # type: ignore[arg-type]
        (record,) = [r for r in caplog.records if "req-7" in r.getMessage()]
        assert "Traceback" in caplog.text and record.exc_info
