"""Pixtral's processor and tower, with the projector of Mistral 3, against those of mlx-vlm."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstack.core.image import ImageSize
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.features.vision.towers.loading import load_tower
from mlxstack.features.vision.towers.tower import Encoding
from mlxstack.models.model_files import processor_of, why_text_only
from tests import vision_models
from tests.features.vision.oracle import PIXTRAL, picture
from tests.tolerance import ROUNDING, distance

pytestmark = pytest.mark.mlx

FIXTURE: Any = mx.load(str(Path(__file__).parent / "pixtral.safetensors"))
ROWS, COLUMNS = FIXTURE["features"].tolist()[0]
SIZE = ImageSize(8 * COLUMNS, 8 * ROWS, rows=ROWS, columns=COLUMNS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tiny Mistral 3 with the tower of the fixture."""
    made = vision_models.build(tmp_path / "model", "mistral3", vision=PIXTRAL)
    (made / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 64}}))
    return made


def processor(folder: Path, max_pixels: int = 1 << 24) -> ImageProcessor:
    found = processor_of(folder, max_pixels)
    assert found is not None
    return found


def is_fixture(folder: Path) -> bool:
    found = load_tower(folder)
    assert found is not None
    encoding = Encoding(found, processor(folder).pixels(picture(90, 50), SIZE), SIZE)
    while not encoding.advance(2):
        pass
    assert encoding.features is not None
    assert encoding.features.deepstack == ()
    return distance(encoding.features.embeddings, FIXTURE["embeddings"]) <= ROUNDING


def test_pixels(folder: Path) -> None:
    assert processor(folder).size(90, 50) == SIZE
    made = processor(folder).pixels(picture(90, 50), SIZE)
    expected = np.array(FIXTURE["pixels"]).reshape(3, 2 * ROWS, 4, 2 * COLUMNS, 4)
    patches = expected.transpose(1, 3, 0, 2, 4).reshape(made.shape)
    assert distance(made, patches) <= ROUNDING


def test_features(folder: Path) -> None:
    assert is_fixture(folder)


@pytest.mark.parametrize(
    ("tower", "projector"),
    [
        ("vision_tower.vision_model.", "multi_modal_projector."),
        ("model.vision_tower.", "model.multi_modal_projector."),
    ],
)
def test_names_and_layout_of_other_converters(folder: Path, tower: str, projector: str) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    name = "vision_tower.patch_conv.weight"
    weights[name] = weights[name].transpose(0, 3, 1, 2)
    renamed = {
        own.replace("vision_tower.", tower).replace("multi_modal_projector.", projector): array
        for own, array in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    assert is_fixture(folder)


def test_rows_end_with_tokens_of_their_own(folder: Path) -> None:
    parts = processor(folder).expand(ImageSize(16, 24, rows=3, columns=2))
    row = (None, None, "[IMG_BREAK]")
    assert parts == (*row, *row, None, None, "[IMG_END]")


@pytest.mark.parametrize(
    ("image", "detail", "expected"),
    [
        ((28, 28), "auto", (1, 1)),
        ((1920, 1080), "auto", (31, 55)),
        ((1920, 1080), "original", (31, 55)),
        ((1920, 1080), "low", (11, 19)),
        ((1, 8000), "auto", (55, 1)),
        ((1, 1), "auto", (1, 1)),
    ],
)
def test_sizes(
    tmp_path: Path, image: tuple[int, int], detail: str, expected: tuple[int, int]
) -> None:
    folder = vision_models.build(tmp_path / "model", "mistral3")
    size = processor(folder).size(*image, detail)
    assert (size.rows, size.columns) == expected
    assert (size.height, size.width) == (28 * size.rows, 28 * size.columns)
    bounded = processor(folder, max_pixels=100_000).size(*image, detail)
    assert bounded.width * bounded.height <= 100_000


def test_a_tower_without_its_projector_does_not_see(folder: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    left = {name: array for name, array in weights.items() if "projector" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), left)
    assert processor_of(folder) is None
    assert why_text_only(folder) == "its vision tower lacks weights"
