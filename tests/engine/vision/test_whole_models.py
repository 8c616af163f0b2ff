"""Whole models with an image against mlx-vlm: logits and greedy tokens."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxstack.core.image import ImageSpan, digest, virtual_ids
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.loading import loader
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.models.model_files import processor_of
from tests import vision_models
from tests.engine.harness import preset_of, running
from tests.engine.vision.oracle import N_LOGITS, PICTURE, picture, scene

pytestmark = pytest.mark.mlx

FIXTURE: Any = mx.load(str(Path(__file__).parent / "whole.safetensors"))


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


def test_logits_are_those_of_mlx_vlm(tmp_path: Path, kind: str) -> None:
    folder = vision_models.build(tmp_path / "model", kind)
    loaded = loader.load(ModelSpec(id=str(folder)), KVSpec())
    assert loaded.images is not None
    prompt, runner = asked(folder), ModelRunner(loaded.model)
    (image,) = prompt["images"]
    while not loaded.images.has(image):
        loaded.images.work("a", image, 1.0)
    caches, greedy = make_prompt_cache(loaded.model), FIXTURE[f"{kind}.greedy"].tolist()
    tokens = (*prompt["tokens"], *greedy[: N_LOGITS - 1])
    rows = []
    # The image alone, the text after it, and one token each, as the engine computes them.
    ends = [image.start, image.end, len(prompt["tokens"]), *range(len(prompt["tokens"]) + 1, 999)]
    start = 0
    for end in ends[: N_LOGITS + 2]:
        part = loaded.images.slot_tokens(caches, tokens[start:end], start, prompt["images"])
        rows.append(runner.execute([part])[-1])
        start = end
    difference = mx.abs(mx.stack(rows[2:]) - FIXTURE[f"{kind}.logits"]).max().item()
    # The recurrent layers of the two libraries differ by 7e-4 on text alone.
    assert difference <= (1e-3 if kind == "qwen3_5" else 1e-4)


def test_greedy_tokens_are_those_of_mlx_vlm(tmp_path: Path, kind: str) -> None:
    folder = vision_models.build(tmp_path / "model", kind)
    greedy = FIXTURE[f"{kind}.greedy"].tolist()
    with running(preset_of(folder), tmp_path / "home") as engine:
        assert engine.answer(**asked(folder), n=len(greedy)) == greedy
