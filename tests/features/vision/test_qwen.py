"""Qwen's processor, tower and positions against those of mlx-vlm."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlxstack.core.errors import SetupError
from mlxstack.core.image import ImageSize
from mlxstack.core.prompt_tokens import ImageSpan
from mlxstack.features.vision.towers import mrope, tower
from mlxstack.features.vision.towers.loading import load_tower
from mlxstack.features.vision.towers.tower import Encoding, Features, VisionTower
from mlxstack.models.model_files import processor_of, vision_files
from tests import vision_models
from tests.features.vision.oracle import PROMPT, QWEN, picture
from tests.tolerance import ROUNDING, distance

pytestmark = pytest.mark.mlx

FIXTURE: Any = mx.load(str(Path(__file__).parent / "qwen.safetensors"))
SIZES = [ImageSize(8 * c, 8 * r, rows=r, columns=c) for r, c in FIXTURE["features"].tolist()]
SIZE = SIZES[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tiny Qwen3-VL with the tower of the fixture."""
    made = vision_models.build(tmp_path / "model", "qwen3_vl", vision=QWEN)
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 2048}}
    (made / "preprocessor_config.json").write_text(json.dumps(settings))
    return made


def encoded(folder: Path, n_blocks: int = 9) -> Features:
    found = load_tower(folder)
    assert found is not None
    return encode(found, n_blocks)


def encode(found: VisionTower, n_blocks: int) -> Features:
    encoding = Encoding(found, pixels(), SIZE)
    while not encoding.advance(n_blocks):
        assert encoding.features is None
    assert encoding.features is not None
    return encoding.features


def pixels() -> mx.array:
    """Pixels of the fixture without the second of two equal frames."""
    return FIXTURE["pixels"].reshape(-1, 3, 2, 16)[:, :, 0].reshape(-1, 48)


def is_fixture(features: Features, within: float = ROUNDING) -> bool:
    deepstack = mx.stack(features.deepstack)
    return (
        distance(features.embeddings, FIXTURE["embeddings"]) <= within
        and distance(deepstack, FIXTURE["deepstack"]) <= within
    )


def renamed(folder: Path, prefix: str) -> dict[str, mx.array]:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    return {k.replace("vision_tower.", prefix): a for k, a in weights.items()}


def test_pixels(folder: Path) -> None:
    processor = processor_of(folder)
    assert processor is not None
    assert processor.size(90, 50) == SIZE
    made = processor.pixels(picture(90, 50), SIZE)
    assert made.dtype == np.float32
    assert distance(made, pixels()) <= ROUNDING


@pytest.mark.parametrize("n_blocks", [1, 3, 9])
def test_features(folder: Path, n_blocks: int) -> None:
    assert is_fixture(encoded(folder, n_blocks))


def test_features_of_a_large_image_by_slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower, "SLICE", 32)
    assert is_fixture(encoded(folder))


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_names_and_layout_of_pytorch(folder: Path, prefix: str) -> None:
    weights = renamed(folder, prefix)
    name = f"{prefix}patch_embed.proj.weight"
    weights[name] = weights[name].transpose(0, 4, 1, 2, 3)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert is_fixture(encoded(folder))


def test_a_quantized_tower(folder: Path) -> None:
    weights = renamed(folder, "vision_tower.")
    special = {"vision_tower.blocks.1.mlp.linear_fc1": {"group_size": 32, "bits": 8}}
    settings = {"group_size": 32, "bits": 4, **special}
    for i, bits in enumerate((4, 8)):
        name = f"vision_tower.blocks.{i}.mlp.linear_fc1"
        parts = mx.quantize(weights[f"{name}.weight"], group_size=32, bits=bits)
        kinds = ("weight", "scales", "biases")
        weights |= {f"{name}.{kind}": part for kind, part in zip(kinds, parts, strict=True)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": settings}
    (folder / "config.json").write_text(json.dumps(config))
    found: Any = load_tower(folder)
    assert isinstance(found.blocks[0].mlp.linear_fc1, nn.QuantizedLinear)
    assert [found.blocks[i].mlp.linear_fc1.bits for i in (0, 1)] == [4, 8]
    assert is_fixture(encode(found, 9), within=0.5)


def test_a_tower_of_qwen3_5_has_no_deepstack(tmp_path: Path) -> None:
    folder = vision_models.build(tmp_path / "model", "qwen3_5")
    processor = processor_of(folder)
    found = load_tower(folder)
    assert processor is not None
    assert found is not None
    size = processor.size(96, 64)
    encoding = Encoding(found, processor.pixels(picture(96, 64), size), size)
    assert encoding.advance(len(found.sequence) + 1), "the last step leaves the tower"
    assert encoding.features is not None
    assert encoding.features.embeddings.shape == (size.n_features, 64)
    assert encoding.features.deepstack == ()
    files = vision_files(folder)
    assert files is not None
    assert files.fingerprint in processor.fingerprint
    weights = vision_models.qwen_tower(vision_models.QWEN3_5["vision_config"])
    sizes = [array.size for _, array in tree_flatten(found.parameters())]
    assert sum(sizes) == sum(array.size for array in weights.values())


def test_missing_and_foreign_weights_are_an_error(folder: Path) -> None:
    weights = renamed(folder, "vision_tower.")
    bias = weights.pop("vision_tower.blocks.2.norm1.bias")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(SetupError, match=r"blocks\.2\.norm1\.bias"):
        load_tower(folder)
    weights["vision_tower.blocks.2.norm1.bias"] = bias[:3]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(SetupError, match=r"blocks\.2\.norm1\.bias"):
        load_tower(folder)


def test_positions() -> None:
    spans = []
    at = 0
    sizes = iter(SIZES)
    for part in PROMPT:
        n = 1
        if isinstance(part, str):
            size = next(sizes)
            n = size.n_features
            spans.append(ImageSpan(at, at + n, b"", size))
        at += n
    expected = np.array(FIXTURE["positions"])
    for start in range(at):
        for end in (start + 1, min(start + 9, at), at):
            assert (mrope.positions(spans, start, end) == expected[:, start:end]).all()
    assert expected[0, -1] == at - 1 + mrope.delta(spans, at - 1)
