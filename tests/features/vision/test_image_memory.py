"""Memory of images: counted by the KV budget, dropped under pressure, freed by a cancellation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest

pytest.importorskip("PIL")

from mlxstack.core.engine_events import FinishReason
from mlxstack.engine.loop import EngineLoop
from mlxstack.features.vision.towers.encoder import ImageEncoder
from mlxstack.models.model_files import vision_weights
from tests import vision_models
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running
from tests.features.vision.test_images_in_slots import Pictures, counts, png
from tests.patience import wait_until

pytestmark = pytest.mark.mlx

T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    with running(preset_of(folder), tmp_path) as driver:
        yield driver


def encoder(loop: EngineLoop) -> ImageEncoder:
    assert isinstance(loop.batch.inputs, ImageEncoder)
    return loop.batch.inputs


def done(engine: Driver, work: Callable[[EngineLoop], T]) -> T:
    """Result of `work` on the MLX thread."""
    return engine.engine.run(work).result(timeout=WAIT_S)


def test_features_are_counted_and_dropped_under_pressure(engine: Driver, folder: Path) -> None:
    scene = Pictures(folder)(prompt(40), png(1), prompt(9, 1))
    cold = engine.cold(**scene)
    n_bytes = done(engine, lambda loop: encoder(loop).n_bytes)
    # 12 features of 64 dimensions, and two levels of deepstack.
    assert n_bytes == 3 * 12 * 64 * 4
    before = done(engine, lambda loop: loop.slot_kv.live_bytes)
    assert engine.engine.cache.reclaim(1).result(timeout=WAIT_S) is not None
    assert done(engine, lambda loop: encoder(loop).n_bytes) == 0
    assert done(engine, lambda loop: loop.slot_kv.live_bytes) <= before - n_bytes
    assert engine.cold(**scene) == cold
    assert counts(engine)[0] == 2


def test_the_tower_counts_as_weights(engine: Driver, folder: Path) -> None:
    facts = engine.engine._loading.result()
    assert vision_weights(folder).n_bytes() > 100_000
    assert facts.n_bytes - vision_weights(folder).n_bytes() == 4 * facts.n_params


def test_features_that_a_prompt_needs_are_not_dropped(engine: Driver, folder: Path) -> None:
    scene = Pictures(folder)(prompt(9), png(1), prompt(9, 1))
    (image,) = scene["images"]

    def work(loop: EngineLoop) -> list[bool]:
        own = encoder(loop)
        found = []
        while not own.has(image):
            own.work("a", image, 1.0)
        own.drop()
        found.append(own.has(image))
        own.release("a")
        own.drop()
        return [*found, own.has(image)]

    assert done(engine, work) == [True, False]


def test_images_of_one_chunk_are_encoded_once_beyond_the_bound(
    engine: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Pictures(folder)(prompt(9), png(1), prompt(3, 1), png(2), prompt(9, 2))
    monkeypatch.setattr("mlxstack.features.vision.towers.encoder.MAX_BYTES", 1)
    assert len(engine.answer(**scene)) > 0
    assert counts(engine)[0] == 2


def test_an_encoding_ends_with_the_last_request_for_it(engine: Driver, folder: Path) -> None:
    scene = Pictures(folder)(prompt(9), png(1), prompt(9, 1))
    (image,) = scene["images"]

    def work(loop: EngineLoop) -> list[bool]:
        own = encoder(loop)
        found = []
        # The pixels may be there at once, and each call then encodes a block.
        own.work("a", image, 0.0)
        own.work("b", image, 0.0)
        while not own._encodings:
            own.work("b", image, 1e-9)
        for request in ("a", "b"):
            found.append(own.n_bytes > 0)
            own.release(request)
        return [*found, own.n_bytes > 0 or bool(own._needed_by)]

    assert done(engine, work) == [True, True, False]


def test_a_cancelled_request_frees_its_pixels(
    engine: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Pictures(folder)(prompt(9), png(1), prompt(9, 1))
    own = done(engine, encoder)
    goes_on = Event()
    decode = own._decode

    def slow(image: Any) -> Any:
        assert goes_on.wait(WAIT_S)
        return decode(image)

    monkeypatch.setattr(own, "_decode", slow)
    ask = engine.submit(**scene)
    wait_until(lambda: bool(own._pixels), "no pixels are asked for")
    engine.engine.cancel(ask)
    assert engine.finish(ask).reason is FinishReason.CANCELLED
    assert done(engine, lambda loop: (encoder(loop)._pixels, encoder(loop)._needed_by)) == ({}, {})
    goes_on.set()
    assert engine.answer(**scene) == engine.cold(**scene)
    assert counts(engine)[0] == 1
