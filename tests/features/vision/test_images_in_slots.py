"""Images in slots: greedy answers are those of a cold prompt alone, no image is encoded twice."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("PIL")

import mlx.core as mx
import numpy as np
from mlx import nn
from msgspec.structs import replace
from PIL import Image

from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import PrefillSpec, Speculation
from mlxstack.core.prompt_tokens import ImageSpan
from mlxstack.core.request import SamplingParams
from mlxstack.features.vision.images.spans import digest, virtual_ids
from mlxstack.features.vision.towers.seam import ImageRope
from mlxstack.models.model_files import processor_of
from tests import vision_models
from tests.engine.harness import Driver, draft_freely, preset_of, prompt, running
from tests.repetition import in_soak
from tests.tolerance import ROUNDING, distance

KINDS = tuple(vision_models.CONFIGS)
COMMON = (KINDS[0], "qwen3_5", "gemma4")
"""Three axes of positions, a hybrid, and windows whose images attend in both directions."""


def png(seed: int, width: int = 128, height: int = 96) -> bytes:
    """Four blocks of random colors."""
    blocks = Image.frombytes("RGB", (2, 2), Random(seed).randbytes(12))
    out = BytesIO()
    blocks.resize((width, height), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


class Pictures:
    """Prompts with images of one folder."""

    def __init__(self, folder: Path) -> None:
        processor = processor_of(folder)
        assert processor is not None
        self.processor = processor
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        self._ids = {one["content"]: one["id"] for one in added}

    @property
    def ends_with_text(self) -> bool:
        """Whether the last token of an image is one of the vocabulary."""
        return self.processor.expand(self.processor.size(64, 64))[-1] is not None

    def __call__(self, *parts: Any) -> dict[str, Any]:
        """Tokens and images of texts (tokens) and images (bytes)."""
        tokens: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, bytes):
                size = self.processor.size(*Image.open(BytesIO(part)).size)
                name = digest(part, self.processor.fingerprint, size)
                virtual = iter(virtual_ids(name, size.n_features))
                own = [
                    next(virtual) if text is None else self._ids[text]
                    for text in self.processor.expand(size)
                ]
                images.append(ImageSpan(len(tokens), len(tokens) + len(own), name, size, part))
                tokens += own
            else:
                tokens += part
        return {"tokens": tuple(tokens), "images": tuple(images)}


@pytest.fixture(params=[*COMMON, *in_soak(*sorted({*KINDS} - {*COMMON}))], scope="module")
def folder(request: Any, tmp_path_factory: Any) -> Path:
    return vision_models.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def pictures(folder: Path) -> Pictures:
    return Pictures(folder)


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    with running(preset_of(folder), tmp_path) as driver:
        yield driver


def counts(engine: Driver) -> tuple[int, int]:
    now = engine.engine.snapshot().counters
    return now.n_image_encodes, now.n_image_tokens


def test_a_second_turn_encodes_and_prefills_no_image(engine: Driver, pictures: Pictures) -> None:
    first = pictures(prompt(150), png(1), prompt(20, 1))
    answer = engine.answer(**first)
    (image,) = first["images"]
    assert counts(engine) == (1, image.end - image.start)
    turn = pictures(prompt(150), png(1), prompt(20, 1), answer, prompt(9, 2))
    again = engine.answer(**turn)
    assert counts(engine) == (1, image.end - image.start)
    assert again == engine.cold(**turn)


def test_67_pages_have_67_keys_and_answers(
    engine: Driver, pictures: Pictures, folder: Path
) -> None:
    """Of one family; of each other one, whose features are of its own, eight pages."""
    n_pages = 67 if folder.name.startswith(KINDS[0]) else 8
    seen = set()
    keys = set()
    for page in range(n_pages):
        scene = pictures(prompt(40), png(page), prompt(9, 1))
        keys.add(scene["tokens"])
        ask = engine.submit(**scene, n=1, sampling=SamplingParams(top_logprobs=1))
        engine.finish(ask)
        seen.add(engine.events(ask, TokenSampled)[0].logprob)
    assert (len(keys), len(seen)) == (n_pages, n_pages)
    assert counts(engine)[0] == n_pages


def test_an_image_does_not_change_what_follows_a_draft(
    folder: Path, tmp_path: Path, pictures: Pictures
) -> None:
    scene = pictures(prompt(60) * 2, png(1), prompt(60))
    answers = []
    for speculation in (Speculation.OFF, Speculation.AUTO):
        preset = preset_of(folder, speculation=speculation)
        with running(preset, tmp_path / speculation) as engine:
            if speculation is Speculation.AUTO:
                draft_freely(engine)
            answers.append(engine.answer(**scene, n=48))
    assert answers[0] == answers[1]


def test_a_prompt_that_ends_with_an_image_fails_alone(engine: Driver, pictures: Pictures) -> None:
    scene = pictures(prompt(20), png(1))
    if pictures.ends_with_text:
        assert engine.answer(**scene) == engine.cold(**scene)
        return
    with pytest.raises(BadRequest, match="ends with an image"):
        engine.answer(**scene)
    text = pictures(prompt(20))
    assert engine.answer(**text) == engine.cold(**text)


def test_a_broken_image_fails_its_request_alone(engine: Driver, pictures: Pictures) -> None:
    scene = pictures(prompt(20), png(1), prompt(9, 1))
    (image,) = scene["images"]
    broken = replace(image, data=image.data[:-40], digest=b"other")
    with pytest.raises(BadRequest, match="broken"):
        engine.answer(scene["tokens"], images=(broken,), use_cache=False)
    assert engine.answer(**scene) == engine.cold(**scene)


def test_rotation_takes_turns_over_the_axes() -> None:
    rope, sections, (half, n) = nn.RoPE(20), (4, 3, 2), (10, 7)
    positions = np.random.default_rng(0).integers(0, 99, (3, n))
    x = mx.random.normal((1, 2, n, 24))
    steps = 10000.0 ** (-np.arange(half) / half)
    # As Transformers' `apply_interleaved_mrope`.
    angles = positions[..., None] * steps
    mixed = angles[0].copy()
    for axis in (1, 2):
        own = slice(axis, sections[axis] * 3, 3)
        mixed[:, own] = angles[axis][:, own]
    a = np.array(x)[..., :half]
    b = np.array(x)[..., half:20]
    cos = np.cos(mixed)
    sin = np.sin(mixed)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin, np.array(x)[..., 20:]], -1)
    image_rope = ImageRope(rope, sections)
    assert distance(image_rope(x, offset=mx.array(positions)), expected) <= ROUNDING
    same = mx.array(np.stack([np.arange(5, 5 + n)] * 3))
    assert distance(image_rope(x, offset=same), rope(x, offset=5)) <= ROUNDING


def test_an_image_is_cut_anywhere_by_what_was_cached(engine: Driver, pictures: Pictures) -> None:
    image = png(3)
    whole = pictures(prompt(30), image, prompt(9, 1))
    cold = engine.cold(**whole)
    (span,) = whole["images"]
    n_whole = len(whole["tokens"])
    before = (2, span.start // 2, span.start - 2, span.start - 1)
    for n in (*before, span.end + 1, span.end + 2, n_whole - 2, n_whole - 1):
        engine.answer(prompt(200, seed=n), 1, slot=0)
        kept = [s for s in whole["images"] if s.end <= n]
        engine.answer(whole["tokens"][:n], 1, slot=0, images=tuple(kept))
        assert engine.answer(**whole, slot=0) == cold, n


@pytest.mark.parametrize("folder", KINDS, indirect=True, scope="module")
def test_an_image_is_cut_anywhere_by_chunks(
    folder: Path, tmp_path: Path, pictures: Pictures, request: pytest.FixtureRequest
) -> None:
    """Of 16 tokens each, which an image of 30 or more begins at every place of.

    An image of a kind that is not common begins at each fifth, but in `make soak`.
    """
    is_common = request.node.callspec.params["folder"] in COMMON
    has_all = is_common or request.config.getoption("--soak")
    places = range(20, 36, 1 if has_all else 5)
    scenes = [pictures(prompt(n), png(4, 192, 160), prompt(9, 1)) for n in places]
    with running(preset_of(folder), tmp_path / "whole") as engine:
        wanted = [engine.cold(**scene, n=4) for scene in scenes]
    small = preset_of(folder, prefill=PrefillSpec(chunk_size=16))
    with running(small, tmp_path / "cut") as engine:
        assert [engine.cold(**scene, n=4) for scene in scenes] == wanted


def test_rows_with_and_without_images_answer_as_alone(engine: Driver, pictures: Pictures) -> None:
    scenes = [
        pictures(prompt(50), png(1), prompt(12, 1)),
        pictures(prompt(70, 4)),
        pictures(png(2, 64, 64), prompt(5, 1), png(5, 128, 64), prompt(30, 2)),
    ]
    colds = [engine.cold(**scene, n=24) for scene in scenes]
    asks = [engine.submit(**scene, n=24, use_cache=False) for scene in scenes]
    for ask in asks:
        engine.finish(ask)
    assert [engine.tokens(ask) for ask in asks] == colds


def test_images_survive_parking_forks_and_a_restart(
    folder: Path, tmp_path: Path, pictures: Pictures
) -> None:
    scene = pictures(prompt(300), png(1), prompt(140, 1))
    other = pictures(prompt(300), png(1), prompt(140, 1), prompt(20, 7))
    with running(preset_of(folder), tmp_path) as engine:
        cold = engine.cold(**scene)
        cold_other = engine.cold(**other)
        assert engine.answer(**scene, slot=0) == cold
        n = counts(engine)
        assert engine.answer(**other, slot=1) == cold_other  # a fork
        engine.answer(prompt(600, 9), slot=0)
        assert engine.answer(**scene, slot=0) == cold
        assert counts(engine) == n
        engine.catch_up()
    with running(preset_of(folder), tmp_path) as engine:
        assert engine.answer(**scene) == cold
        assert counts(engine) == (0, 0)
