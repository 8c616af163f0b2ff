"""Sizes, fingerprints and checkpoints of Qwen's image processor."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstack.core.errors import SetupError
from mlxstack.core.image import ImageSize
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.features.vision.images.spans import digest
from mlxstack.models.model_files import processor_of, why_text_only
from tests import models, vision_models

pytestmark = pytest.mark.mlx


def processor(folder: Path, max_pixels: int = 1 << 24) -> ImageProcessor:
    found = processor_of(folder, max_pixels)
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return vision_models.build(tmp_path / "model", "qwen3_vl")


@pytest.mark.parametrize(
    ("image", "detail", "expected"),
    [
        ((64, 64), "auto", ImageSize(64, 64, rows=2, columns=2)),
        ((1920, 1080), "auto", ImageSize(1568, 896, rows=28, columns=49)),
        ((1920, 1080), "low", ImageSize(512, 288, rows=9, columns=16)),
        ((1920, 1080), "original", ImageSize(1920, 1088, rows=34, columns=60)),
        ((1, 8000), "auto", ImageSize(32, 2560, rows=80, columns=1)),
        ((1, 1), "auto", ImageSize(64, 64, rows=2, columns=2)),
    ],
)
def test_sizes(folder: Path, image: tuple[int, int], detail: str, expected: ImageSize) -> None:
    size = processor(folder).size(*image, detail)
    assert size == expected
    assert processor(folder).expand(size) == (None,) * size.n_features


def test_no_image_exceeds_the_pixels_of_the_preset(folder: Path) -> None:
    bounded = processor(folder, max_pixels=100_000)
    size = bounded.size(4000, 4000, "original")
    assert 80_000 < size.width * size.height <= 100_000


def test_one_image_in_two_sizes_has_two_digests(folder: Path) -> None:
    made = processor(folder)
    sizes = [made.size(1920, 1080, detail) for detail in ("auto", "low")]
    first, second = (digest(b"png", made.fingerprint, size) for size in sizes)
    assert first != second


def test_another_tower_is_another_fingerprint(tmp_path: Path, folder: Path) -> None:
    other = vision_models.build(tmp_path / "other", "qwen3_vl", seed=1)
    assert processor(folder).fingerprint != processor(other).fingerprint


def test_a_config_without_a_tower_does_not_see(folder: Path, tmp_path: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert why_text_only(folder) == ""
    last = {k: a for k, a in weights.items() if "merger" not in k}
    mx.save_safetensors(str(folder / "model.safetensors"), last)
    assert processor_of(folder) is None
    assert why_text_only(folder) == "its vision tower lacks weights"
    text = {k: a for k, a in weights.items() if "vision_tower" not in k}
    mx.save_safetensors(str(folder / "model.safetensors"), text)
    assert processor_of(folder) is None
    assert why_text_only(folder) == "its files hold no vision tower"
    assert processor_of(models.build(tmp_path / "text", "tiny")) is None


def test_another_family_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "glm4v"}
    (folder / "config.json").write_text(json.dumps(config))
    assert processor_of(folder) is None
    assert "glm4v is not served; qwen3_vl," in why_text_only(folder)


@pytest.mark.parametrize(
    "settings", ["[]", '{"size": {"longest_edge": 0}}', '{"image_std": [1]}', "{"]
)
def test_broken_settings_are_an_error(folder: Path, settings: str) -> None:
    (folder / "preprocessor_config.json").write_text(settings)
    with pytest.raises(SetupError, match="settings of the image processor"):
        processor_of(folder)


def test_a_truncated_file_is_an_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SetupError, match=r"cannot be read|should be"):
        processor_of(folder)
