"""Gemma 3: one size of images, names of other converters, and KV of full precision."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import mlx.core as mx

from mlxstack.core.image import ImageSize
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.prompt_tokens import ImageSpan, whole_images
from mlxstack.engine.loading import loader
from mlxstack.features.vision.towers.encoder import with_images
from mlxstack.features.vision.towers.loading import load_tower
from mlxstack.features.vision.towers.tower import Encoding
from mlxstack.models.model_files import processor_of, why_text_only
from tests import vision_models
from tests.features.vision.oracle import picture
from tests.tolerance import ROUNDING, distance

pytestmark = pytest.mark.mlx

SIZE = ImageSize(112, 112, rows=4, columns=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return vision_models.build(tmp_path / "model", "gemma3")


def features(folder: Path, n_blocks: int = 9) -> mx.array:
    tower = load_tower(folder)
    processor = processor_of(folder)
    assert tower is not None
    assert processor is not None
    encoding = Encoding(tower, processor.pixels(picture(90, 50), SIZE), SIZE)
    while not encoding.advance(n_blocks):
        pass
    assert encoding.features is not None
    return encoding.features.embeddings


def test_every_image_has_one_size(folder: Path) -> None:
    processor = processor_of(folder)
    assert processor is not None
    assert {processor.size(*one) for one in ((9, 9), (4000, 30), (112, 112))} == {SIZE}
    assert processor.expand(SIZE) == (None,) * 16


def test_names_and_layout_of_pytorch_and_steps(folder: Path) -> None:
    expected = features(folder)
    assert distance(features(folder, 1), expected) <= ROUNDING
    weights: Any = mx.load(str(folder / "model.safetensors"))
    name = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    weights[name] = weights[name].transpose(0, 3, 1, 2)
    renamed = {
        k.replace("vision_tower.", "model.vision_tower.").replace("multi_", "model.multi_"): a
        for k, a in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    assert distance(features(folder), expected) <= ROUNDING


def test_quantized_kv_takes_no_images(folder: Path) -> None:
    spec = ModelSpec(id=str(folder))
    assert with_images(loader.load(spec, KVSpec()), KVSpec()).facts.accepts_images
    assert not with_images(loader.load(spec, KVSpec()), KVSpec(bits=8)).facts.accepts_images


def test_a_tower_without_its_projector_takes_no_images(folder: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    left = {name: array for name, array in weights.items() if "projector" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), left)
    assert why_text_only(folder) == "its vision tower lacks weights"


def test_a_chunk_ends_before_or_after_an_image() -> None:
    spans = (ImageSpan(10, 26, b"", SIZE), ImageSpan(26, 42, b"", SIZE))
    ends = [whole_images(spans, 0, end) for end in (10, 11, 25, 26, 30, 42, 50)]
    assert ends == [10, 10, 10, 26, 26, 42, 50]
    assert whole_images(spans, 10, 12) == 26
