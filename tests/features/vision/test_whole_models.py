"""Whole models with an image against mlx-vlm: logits and greedy tokens."""

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxstack.core.image import ImageSize
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.prompt_tokens import ImageSpan, PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.loading import loader
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.vision.images.spans import digest, virtual_ids
from mlxstack.features.vision.towers.encoder import ImageEncoder, with_images
from mlxstack.features.vision.towers.loading import load_tower
from mlxstack.features.vision.towers.tower import Encoding, VisionTower
from mlxstack.models.model_files import processor_of
from tests import vision_models
from tests.engine.harness import preset_of, running
from tests.features.vision.oracle import N_LOGITS, PICTURE, picture, scene
from tests.tolerance import MODEL_ROUNDING, distance

pytestmark = pytest.mark.mlx

FIXTURE: Any = mx.load(str(Path(__file__).parent / "whole.safetensors"))

POSITIONS = re.compile(r"pos_embed|position_embedding")
"""Names of tables with a learned vector for each position of a patch."""
WRONG = 50
"""A wrong tower is at least so many times as far off as rounding may be."""


@pytest.fixture(params=vision_models.CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def asked(folder: Path) -> dict[str, Any]:
    """Tokens and images of the prompt of the fixture."""
    processor = processor_of(folder)
    assert processor is not None
    out = BytesIO()
    picture(*PICTURE).save(out, "PNG")
    size, (tokens, place) = processor.size(*PICTURE), scene(folder)
    name = digest(out.getvalue(), processor.fingerprint, size)
    virtual = iter(virtual_ids(name, size.n_features))
    parts = zip(processor.expand(size), tokens[place], strict=True)
    tokens[place] = [next(virtual) if text is None else token for text, token in parts]
    span = ImageSpan(place.start, place.stop, name, size, out.getvalue())
    return {"tokens": tuple(tokens), "images": (span,)}


def logits(folder: Path, kind: str) -> mx.array:
    """Logits of the last token of the prompt and of the first tokens of the answer."""
    loaded = with_images(loader.load(ModelSpec(id=str(folder)), KVSpec()), KVSpec())
    encoder = loaded.inputs
    assert isinstance(encoder, ImageEncoder)
    prompt = asked(folder)
    runner = ModelRunner(loaded.model)
    (image,) = prompt["images"]
    while not encoder.has(image):
        encoder.work("a", image, 1.0)
    caches = make_prompt_cache(loaded.model)
    greedy = FIXTURE[f"{kind}.greedy"].tolist()
    tokens = (*prompt["tokens"], *greedy[: N_LOGITS - 1])
    request = Request("a", PromptTokens(tokens, prompt["images"]), 1)
    rows = []
    # The image alone, the text after it, and one token each, as the engine computes them.
    ends = [image.start, image.end, len(prompt["tokens"]), *range(len(prompt["tokens"]) + 1, 999)]
    start = 0
    for end in ends[: N_LOGITS + 2]:
        part = encoder.slot_tokens(caches, request, start, end)
        rows.append(runner.execute([part])[-1])
        start = end
    return mx.stack(rows[2:])


def test_logits_are_those_of_mlx_vlm(tmp_path: Path, kind: str) -> None:
    folder = vision_models.build(tmp_path / "model", kind)
    assert distance(logits(folder, kind), FIXTURE[f"{kind}.logits"]) <= MODEL_ROUNDING


def test_logits_of_wrong_positions_of_patches_are_far_off(tmp_path: Path, kind: str) -> None:
    """Each patch has the learned position of another; that of a wrong base if none is learned."""
    folder = vision_models.build(tmp_path / "model", kind)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    tables = [name for name in weights if name.startswith("vision_") and POSITIONS.search(name)]
    if tables:
        moved = {name: mx.roll(weights[name], 1, axis=-2) for name in tables}
        mx.save_safetensors(str(folder / "model.safetensors"), weights | moved)
    else:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["rope_theta"] *= 2
        (folder / "config.json").write_text(json.dumps(config))
    assert distance(logits(folder, kind), FIXTURE[f"{kind}.logits"]) > WRONG * MODEL_ROUNDING


def test_features_of_patches_in_another_order_are_far_off(tmp_path: Path, kind: str) -> None:
    """The first and the last patch in each other's place."""
    folder = vision_models.build(tmp_path / "model", kind)
    tower = load_tower(folder)
    processor = processor_of(folder)
    assert tower is not None
    assert processor is not None
    size = processor.size(*PICTURE)
    pixels = processor.pixels(picture(*PICTURE), size)
    swapped = pixels.copy()
    swapped[[0, -1]] = pixels[[-1, 0]]
    right, wrong = (embeddings(tower, patches, size) for patches in (pixels, swapped))
    assert distance(wrong, right) > WRONG * MODEL_ROUNDING


def embeddings(tower: VisionTower, pixels: Any, size: ImageSize) -> mx.array:
    encoding = Encoding(tower, pixels, size)
    while not encoding.advance(9):
        pass
    assert encoding.features is not None
    return encoding.features.embeddings


def test_greedy_tokens_are_those_of_mlx_vlm(tmp_path: Path, kind: str) -> None:
    folder = vision_models.build(tmp_path / "model", kind)
    greedy = FIXTURE[f"{kind}.greedy"].tolist()
    with running(preset_of(folder), tmp_path / "home") as engine:
        assert engine.answer(**asked(folder), n=len(greedy)) == greedy
