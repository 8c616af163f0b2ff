"""The identity of KV: whatever shapes it is a part, and another identity never hits."""

import json
from pathlib import Path

import mlx_lm
import pytest
from msgspec.structs import asdict, replace

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.errors import Damaged
from mlxstack.core.model_info import Identity
from mlxstack.core.preset import KVSpec, ModelSpec, Preset
from mlxstack.engine.loading.loader import load, weights_digest
from mlxstack.store import kv_file_format
from tests.engine.harness import WAIT_S, preset_of, prompt, running
from tests.models import build

pytestmark = pytest.mark.mlx

PROMPT = prompt(300, seed=5)
ARCHITECTURE = """
from mlx_lm.models import llama
from mlx_lm.models.llama import ModelArgs
{more}
class Model(llama.Model):
    def __call__(self, inputs, cache=None, **more):
        return super().__call__((inputs + {shift}) % 1024, cache=cache, **more)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with an architecture of its own."""
    folder = build(tmp_path / "model", "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "arch.py"}))
    (folder / "arch.py").write_text(ARCHITECTURE.format(more="", shift=0))
    return folder


def preset_for(folder: Path) -> Preset:
    spec = ModelSpec(id=str(folder), trust_remote_code=True)
    return replace(preset_of(folder), model=spec)


def identity_of(folder: Path) -> Identity:
    spec = ModelSpec(id=str(folder), trust_remote_code=True)
    return load(spec, KVSpec()).facts.identity


def test_d17_kv_of_other_code_of_the_model_never_hits(folder: Path, tmp_path: Path) -> None:
    preset = preset_for(folder)
    with running(preset, tmp_path) as driver:
        driver.answer(PROMPT, 8, slot=0)
        driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(WAIT_S)
        driver.catch_up()
    (folder / "arch.py").write_text(ARCHITECTURE.format(more="", shift=1))
    with running(preset, tmp_path) as driver:
        ask = driver.submit(PROMPT, 8)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 0
        assert driver.tokens(ask) == driver.cold(PROMPT, 8)
        with pytest.raises(Damaged, match="version of mlx-lm"):
            driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(WAIT_S)
    (folder / "arch.py").write_text(ARCHITECTURE.format(more="", shift=0))
    with running(preset, tmp_path) as driver:
        ask = driver.submit(PROMPT, 8)
        driver.finish(ask)
        assert driver.seated(ask).n_cached >= 256


def test_d17_the_code_of_a_model_and_its_settings_shape_the_identity(folder: Path) -> None:
    first = identity_of(folder)
    assert identity_of(folder) == first
    (folder / "helper.py").write_text("SHIFT = 1\n")
    second = identity_of(folder)
    (folder / "helper.py").write_text("SHIFT = 2\n")
    third = identity_of(folder)
    (folder / "hf_quant_config.json").write_text("{}")
    fourth = identity_of(folder)
    assert len({one.key() for one in (first, second, third, fourth)}) == 4
    assert {one.weights for one in (first, second, third, fourth)} == {first.weights}


def test_d17_the_versions_that_shape_kv_shape_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "model", "tiny")
    found = identity_of(folder)
    assert (found.mlx_lm, found.kv_format) == (mlx_lm.__version__, kv_file_format.VERSION)
    assert found.code == "", "nothing but the weights and the configuration"
    monkeypatch.setattr(mlx_lm, "__version__", "0.0.1")
    assert identity_of(folder).key() != found.key()


@pytest.mark.parametrize("layout", ["rows", "ranges"])
def test_d17_tables_on_disk_shape_the_identity(tmp_path: Path, layout: str) -> None:
    """The two layouts of manifests that mlx-vlm 0.7 writes for `qwen4_exp`."""
    folder, source = tmp_path / "model", tmp_path / "source"
    folder.mkdir()
    source.mkdir()
    config = {"model_type": "qwen4_exp", "text_config": {"ple_storage": {"manifest": "ple.json"}}}
    tables: dict[str, object] = {"source_root": "../source", "cache_rows": 0}
    if layout == "rows":
        tables["data_file"] = "ple-q4.rows"
        data = folder / "ple-q4.rows"
    else:
        tensor = {"file": "part.safetensors", "offset": 8, "dtype": "U32", "shape": [2, 4]}
        tables["shards"] = [{"row_start": 0, "row_count": 2, "weight": tensor}]
        data = source / "part.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "ple.json").write_text(json.dumps(tables))
    data.write_bytes(b"some rows")
    digests = [weights_digest(folder), weights_digest(folder)]
    data.write_bytes(b"other rows")
    digests.append(weights_digest(folder))
    (folder / "ple.json").write_text(json.dumps({**tables, "row_count": 1}))
    digests.append(weights_digest(folder))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_d17_every_field_is_a_part_of_the_key() -> None:
    plain = Identity("m", "w")
    changed = [replace(plain, **{name: f"other {name}"}) for name in asdict(plain)]
    assert len({one.key() for one in (plain, *changed)}) == 1 + len(changed)
