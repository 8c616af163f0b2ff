"""A model with a cache class of its own is served, and never copied or stored wrongly."""

from pathlib import Path

import pytest

from mlxstack.core.commands import SaveSlot
from mlxstack.core.errors import Unsupported
from mlxstack.core.preset import SlotSpec
from tests.engine.harness import preset_of, prompt, running
from tests.matrix.configs import config_of
from tests.models import VOCAB, write
from tests.patience import PATIENCE_S


@pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")
def test_z11_an_unknown_cache_is_served_alone_and_not_stored(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {**config_of("deepseek_v41"), "vocab_size": VOCAB})
    preset = preset_of(model, slots=SlotSpec(count=2, n_ctx=512))
    with running(preset, tmp_path / "home") as driver:
        tokens = prompt(140)
        cold = driver.cold(tokens, 4, slot=0)
        assert driver.engine.snapshot().why_not_batching
        assert driver.answer(tokens, 4, slot=0) == cold
        assert driver.answer((*tokens, 1, 2, 3), 4, slot=1) == driver.cold((*tokens, 1, 2, 3), 4)
        with pytest.raises(Unsupported, match="cannot be stored"):
            driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
