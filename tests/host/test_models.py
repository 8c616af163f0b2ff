"""Models are found and weighed from their files alone."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxstack.config.presets import builtin_folder, listed, load
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ModelSpec
from mlxstack.host.home import Home
from mlxstack.models.folder_check import check_folder
from mlxstack.models.model_files import (
    INDEX,
    find_model,
    measured,
    missing_weights,
    quantization_in,
    read_config,
    weight_files,
)
from mlxstack.policy.memory.capacity import Weights

EXCERPTS = builtin_folder() / "configs"


def model_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tensors = {
        "model.layers.0.weight": np.zeros((4, 8), dtype=np.uint32),
        "model.layers.0.scales": np.zeros((4, 2), dtype=np.float16),
        "model.norm.weight": np.zeros(3, dtype=np.float32),
        "vision_tower.patch.weight": np.zeros(1000, dtype=np.float16),
        "model.vision_tower.patch.bias": np.zeros(1000, dtype=np.float16),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def test_a13_headers_tell_what_will_be_loaded(tmp_path: Path) -> None:
    weights = measured(model_folder(tmp_path))
    assert weights == Weights(packed=128, n_half=8, n_single=3)
    assert read_config(tmp_path).weights == weights
    assert read_config(tmp_path / "config.json").config == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "16 bit"),
        ({"torch_dtype": "float32"}, "32 bit"),
        ({"dtype": "bfloat16"}, "16 bit"),
        ({"dtype": "float32", "quantization": {"bits": 4}}, "4 bit"),
    ],
)
def test_the_precision_of_weights_is_named(config: dict[str, Any], name: str) -> None:
    assert quantization_in(config) == name


def test_a13_half_a_download_is_not_measured(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert measured(folder) is None
    (folder / "model.safetensors").unlink()
    assert measured(folder) is None


def test_an_index_of_other_files_counts_for_nothing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    weights = measured(folder)
    index = {"weight_map": {"a": "model-00001-of-00005.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights is not None
    assert measured(folder) == weights


@pytest.mark.parametrize("n_missing", [1, 20_000])
def test_a_file_that_ends_early_is_named(tmp_path: Path, n_missing: int) -> None:
    file = model_folder(tmp_path) / "model.safetensors"
    save_file({"model.norm.weight": np.zeros(10_000, dtype=np.float32)}, file)
    os.truncate(file, file.stat().st_size - n_missing)
    with pytest.raises(SetupError, match=r"model\.safetensors ends early"):
        measured(tmp_path)


def test_shards_without_an_index_are_counted_by_their_names(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    assert missing_weights(folder) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 3)]
    assert measured(folder) is None


@pytest.mark.parametrize("has_index", [True, False])
def test_a_whole_file_beside_shards_is_refused(tmp_path: Path, has_index: bool) -> None:
    folder = model_folder(tmp_path)
    weights = measured(folder)
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    if has_index:
        index = {"weight_map": dict(zip("ab", shards, strict=True))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors", folder / shards[0])
    save_file({"b": np.zeros(4, dtype=np.uint8)}, folder / shards[1])
    for check in (measured, read_config, check_folder):
        with pytest.raises(SetupError, match=rf"model\.safetensors beside {shards[0]}"):
            check(folder)
    (folder / "model.safetensors").unlink()
    assert weights is not None
    assert measured(folder) == weights.plus(Weights(packed=4))


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        ("model-00001-of-00003.safetensors", "delete model-00001-of-00003"),
        ("model-00001-of-00002 (1).safetensors", r"delete model-00001-of-00002 \(1\)"),
        ("model_old.safetensors", "delete model_old"),
    ],
)
def test_files_of_two_models_are_refused(tmp_path: Path, extra: str, remedy: str) -> None:
    folder = model_folder(tmp_path)
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    (folder / "model.safetensors").rename(folder / first)
    save_file({"b": np.zeros(4, dtype=np.uint8)}, folder / second)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    weights = measured(folder)
    save_file({"c": np.ones(4, dtype=np.uint8)}, folder / extra)
    assert measured(folder) != weights
    save_file({"b": np.ones(4, dtype=np.uint8)}, folder / extra)
    for check in (measured, read_config, check_folder):
        with pytest.raises(SetupError, match=f"the tensor b in {second} .* {remedy}"):
            check(folder)
    # The same file twice mixes nothing.
    shutil.copy(folder / second, folder / extra)
    check_folder(folder)


def test_files_of_macos_beside_the_weights_are_no_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    weights = read_config(folder).weights
    (folder / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07" + bytes(4092))
    assert read_config(folder).weights == weights
    assert weight_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x04\x00\x00\x00\x00\x00\x00\x00nope"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (model_folder(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(SetupError, match=r"model\.safetensors is (damaged|not what it should be)"):
        measured(tmp_path)


def test_a13_a_model_that_is_not_here_is_judged_by_its_excerpt() -> None:
    found = find_model(ModelSpec(id="mlx-community/gemma-4-26b-a4b-it-4bit"), EXCERPTS)
    assert found.is_excerpt
    assert found.weights is None
    assert found.source == EXCERPTS / "gemma4-26b-a4b.json"


def test_a13_the_embedded_model_is_measured(tmp_path: Path) -> None:
    found = find_model(ModelSpec(id="demo"), EXCERPTS)
    assert found.weights is not None
    assert 0 < found.weights.n_bytes() < 2**24
    folder = model_folder(tmp_path)
    assert find_model(ModelSpec(id=str(folder)), EXCERPTS).weights is not None


def test_a_model_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(SetupError, match="nothing is known of nobody/nothing"):
        find_model(ModelSpec(id="nobody/nothing"), EXCERPTS)


def test_every_shipped_preset_can_be_planned_without_its_model(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in listed(home):
        found = find_model(load(name, home).preset.model, EXCERPTS)
        assert found.config["model_type"]
    for file in EXCERPTS.glob("*.json"):
        config = json.loads(file.read_text())
        assert "published config.json" in config["note"]
        assert config["source"].startswith("https://")
        assert load(file.stem, home).preset.model.id == config["excerpt_of"]
