"""Models with cache classes of their own are served, and never copied or stored wrongly."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.errors import Unsupported
from mlxstack.core.preset import SlotSpec
from tests import models
from tests.engine.harness import preset_of, prompt, running
from tests.matrix.configs import config_of
from tests.models import VOCAB, write
from tests.patience import PATIENCE_S

SLOTS = SlotSpec(count=2, n_ctx=512)
OWN_CACHE = """
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import Model as Llama, ModelArgs


class OwnCache(KVCache):
    pass


class Model(Llama):
    def make_cache(self):
        return [OwnCache() for _ in self.layers]
"""


def test_z11_an_unknown_cache_is_served_and_not_stored(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", models.LLAMA)
    (folder / "model.py").write_text(OWN_CACHE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    preset = preset_of(folder, slots=SLOTS)
    preset = replace(preset, model=replace(preset.model, trust_remote_code=True))
    with running(preset, tmp_path / "home") as driver:
        tokens = prompt(140)
        cold = driver.cold(tokens, 4, slot=0)
        assert driver.answer(tokens, 4, slot=0) == cold
        assert driver.answer((*tokens, 1, 2, 3), 4, slot=1) == driver.cold((*tokens, 1, 2, 3), 4)
        with pytest.raises(Unsupported, match="cannot be stored"):
            driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)


@pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")
def test_a_cache_of_a_model_file_is_kept_as_it_is(tmp_path: Path) -> None:
    """DeepSeek V4.1: a window, compressed groups, and the rows of an open one."""
    folder = write(tmp_path / "model", {**config_of("deepseek_v41"), "vocab_size": VOCAB})
    tokens = prompt(140)
    longer = (*tokens, 1, 2, 3)
    with running(preset_of(folder, slots=SLOTS), tmp_path / "home") as driver:
        cold = driver.cold(tokens, 4, slot=0)
        cold_longer = driver.cold(longer, 4, slot=0)
        assert driver.engine.snapshot().why_not_batching
        assert driver.answer(tokens, 4, slot=0) == cold
        driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
        assert driver.answer(longer, 4, slot=1) == cold_longer
        driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(timeout=PATIENCE_S)
        assert driver.answer(longer, 4, slot=0) == cold_longer
