"""Room for a prompt: made some layers at a time, so that other slots decode meanwhile."""

from pathlib import Path

import pytest

from mlxstack.core.preset import PrefillSpec
from mlxstack.engine.kv import slot_context
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running

pytestmark = pytest.mark.mlx

ASKED = prompt(700, seed=1)


def full_layers(context: SlotContext) -> int:
    """Layers with room for the whole prompt."""
    filled = [leaf for leaf in context.leaves if cache_adapters.is_sliceable(leaf)]
    return sum(cache_adapters.parts_of(leaf)[0].shape[2] >= len(ASKED) for leaf in filled)


@pytest.mark.parametrize("at_once", [1, slot_context.AT_ONCE])
def test_a_step_makes_room_in_some_layers_and_promises_the_rest(
    at_once: int, model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_context, "AT_ONCE", at_once)
    made: list[tuple[int, int]] = []
    reserve = SlotContext.reserve

    def noted(context: SlotContext, n_tokens: int) -> None:
        before = full_layers(context) if len(context) else 0
        reserve(context, n_tokens)
        if len(context):
            made.append((full_layers(context) - before, context.n_unreserved))

    preset = preset_of(model_of("tiny"), prefill=PrefillSpec(chunk_size=64))
    with running(preset, tmp_path) as driver:
        cold = driver.cold(ASKED, 8)
        with monkeypatch.context() as spied:
            spied.setattr(SlotContext, "reserve", noted)
            assert driver.answer(ASKED, 8, use_cache=False) == cold
        n_layers = len(driver.engine.loaded.loop.slots[0].leaves)
    layers, promised = zip(*made, strict=True)
    per_step = 1 if at_once == 1 else n_layers
    assert layers[0] == per_step and sum(layers) == n_layers
    assert all(n in (0, per_step) for n in layers)
    assert list(promised) == sorted(promised, reverse=True) and promised[-1] == 0
    assert (promised[0] > 0) == (at_once == 1)
