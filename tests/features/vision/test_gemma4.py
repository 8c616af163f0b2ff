"""Gemma 4: sizes as mlx-vlm's, and the parts of a checkpoint that decide about images."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import mlx.core as mx

from mlxstack.core.image import ImageSize
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.loading import loader
from mlxstack.engine.model.row_views import ExtraPairs
from mlxstack.features.vision.towers.encoder import with_images
from mlxstack.features.vision.towers.loading import load_tower
from mlxstack.features.vision.towers.tower import Encoding
from mlxstack.models.model_files import processor_of, why_text_only
from tests import vision_models
from tests.features.vision.oracle import picture
from tests.tolerance import ROUNDING, distance

pytestmark = pytest.mark.mlx

FIXTURE: Any = mx.load(str(Path(__file__).parent / "gemma4.safetensors"))
SIZE = ImageSize(240, 192, rows=4, columns=5)
KINDS = ("gemma4", "gemma4_e4b")


def with_settings(folder: Path, most: int, n_positions: int = 10240) -> Path:
    """Model that gives an image at most so many features."""
    config = {**vision_models.GEMMA4["vision_config"], "position_embedding_size": n_positions}
    made = vision_models.build(folder, "gemma4", vision=config)
    (made / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": most}))
    return made


def size_of(folder: Path, *image: Any, max_pixels: int = 1 << 24) -> ImageSize:
    processor = processor_of(folder, max_pixels)
    assert processor is not None
    return processor.size(*image)


def features(folder: Path, n_blocks: int = 9) -> mx.array:
    tower = load_tower(folder)
    processor = processor_of(folder)
    assert tower is not None
    assert processor is not None
    encoding = Encoding(tower, processor.pixels(picture(90, 70), SIZE), SIZE)
    while not encoding.advance(n_blocks):
        pass
    assert encoding.features is not None
    return encoding.features.embeddings


@pytest.mark.parametrize("most", [70, 280, 1120])
def test_sizes_are_those_of_mlx_vlm(tmp_path: Path, most: int) -> None:
    folder = with_settings(tmp_path / "model", most)
    for image, expected in zip(
        FIXTURE["images"].tolist(), FIXTURE["features"].tolist(), strict=True
    ):
        if image[2] != most:
            continue
        size = size_of(folder, *image[:2])
        assert [size.rows, size.columns] == expected, image
        assert (size.width, size.height) == (48 * size.columns, 48 * size.rows)
        assert size.n_features <= most


@pytest.mark.parametrize(
    ("image", "detail", "expected"),
    [
        ((1920, 1080), "auto", (12, 22)),
        ((1920, 1080), "low", (6, 11)),
        ((1920, 1080), "original", (25, 44)),
        # A small image gets no more features than its pixels need.
        ((300, 200), "original", (13, 20)),
    ],
)
def test_detail_decides_the_number_of_features(
    tmp_path: Path, image: tuple[int, int], detail: str, expected: tuple[int, int]
) -> None:
    folder = with_settings(tmp_path / "model", 280)
    size = size_of(folder, *image, detail)
    assert (size.rows, size.columns) == expected
    bounded = size_of(folder, *image, detail, max_pixels=100_000)
    assert bounded.width * bounded.height <= 100_000


def test_a_narrow_image_has_no_more_positions_than_were_learned(tmp_path: Path) -> None:
    folder = with_settings(tmp_path / "model", 280, n_positions=128)
    size = size_of(folder, 2, 8000)
    # 128 positions are patches; three patches make a feature.
    assert (size.rows, size.columns) == (42, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_other_converters_and_steps(tmp_path: Path, kind: str) -> None:
    folder = vision_models.build(tmp_path / "model", kind)
    expected = features(folder)
    assert distance(features(folder, 1), expected) <= ROUNDING
    weights: Any = mx.load(str(folder / "model.safetensors"))
    renamed = {
        k.replace("vision_tower.", "model.vision_tower.").replace("embed_v", "model.embed_v"): a
        for k, a in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    assert distance(features(folder), expected) <= ROUNDING


def test_bounds_of_a_tower_that_has_none_are_left_out(tmp_path: Path) -> None:
    folder = vision_models.build(tmp_path / "model", "gemma4")
    expected = features(folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["vision_tower.encoder.layers.0.mlp.up_proj.input_max"] = mx.array(0.1)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert (features(folder) == expected).all()


def test_quantized_kv_takes_images_of_causal_models_only(tmp_path: Path) -> None:
    for kind, takes in (("gemma4", False), ("gemma4_e4b", True)):
        spec = ModelSpec(id=str(vision_models.build(tmp_path / kind, kind)))
        assert with_images(loader.load(spec, KVSpec()), KVSpec()).facts.accepts_images
        kv = KVSpec(bits=8)
        assert with_images(loader.load(spec, kv), kv).facts.accepts_images == takes


def test_a_tower_without_its_projector_takes_no_images(tmp_path: Path) -> None:
    folder = vision_models.build(tmp_path / "model", "gemma4")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    left = {name: array for name, array in weights.items() if "embed_vision" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), left)
    assert why_text_only(folder) == "its vision tower lacks weights"


def test_pairs_hold_within_the_window_of_windowed_layers() -> None:
    pairs = mx.ones((4, 4), mx.bool_)
    extra = ExtraPairs(pairs, only_in_windows=True)
    assert extra.within(None) is None
    within = extra.within(2)
    assert within is not None
    assert within.tolist() == [[key > query - 2 for key in range(4)] for query in range(4)]
    assert ExtraPairs(pairs).within(2) is pairs
