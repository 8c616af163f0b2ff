"""The bound on stalls while an image joins, on a clock that only the work of the engine moves."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("PIL")

from mlxstack.core.preset import PrefillSpec, SlotSpec
from mlxstack.core.prompt_tokens import ImageSpan
from mlxstack.engine.decode.batch import Batch
from mlxstack.features.vision.towers import tower
from mlxstack.features.vision.towers.blocks import VisionBlock
from mlxstack.features.vision.towers.encoder import ImageEncoder
from tests import vision_models
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running
from tests.features.vision.test_image_memory import done
from tests.features.vision.test_images_in_slots import Pictures, png
from tests.patience import wait_until

pytestmark = pytest.mark.mlx

N_BLOCKS = 27
MERGED = 4
"""Patches of a feature."""
STEP_S = 0.025
BOUND_S = PrefillSpec().max_stall_ms / 1000


class Clock:
    """Seconds that decode steps and rows of the tower's blocks have taken."""

    def __init__(self, block_s: float, n_patches: int) -> None:
        self.now = 0.0
        self.block_s = block_s
        self.n_patches = n_patches
        self.n_rows: list[int] = []
        """Rows of blocks between two decode steps."""
        self.longest_s = self._decoded_at = 0.0

    def decoded(self) -> None:
        """A step of the decoding requests is over."""
        self.now += STEP_S
        self.longest_s = max(self.longest_s, self.now - self._decoded_at)
        self._decoded_at = self.now
        self.n_rows.append(0)

    def encoded(self, n_rows: int) -> None:
        """Rows of a block are computed."""
        self.now += n_rows * self.block_s / self.n_patches
        self.n_rows[-1] += n_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower of as many blocks as those of Qwen3-VL and SigLIP have."""
    vision = vision_models.QWEN3_VL["vision_config"] | {"depth": N_BLOCKS}
    return vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl", vision=vision)


def moved(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps and blocks move the clock, and the engine read it."""
    step = Batch.step
    output = VisionBlock.output

    def decode(batch: Batch, **more: Any) -> Any:
        tokens = step(batch, **more)
        clock.decoded()
        return tokens

    def computed(block: VisionBlock, hidden: Any, attended: Any) -> Any:
        clock.encoded(len(hidden))
        return output(block, hidden, attended)

    monkeypatch.setattr(Batch, "step", decode)
    monkeypatch.setattr(VisionBlock, "output", computed)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)


def joined(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, block_s: float) -> Clock:
    """Clock after an image joined three requests that decode."""
    preset = preset_of(folder, slots=SlotSpec(count=4, n_ctx=1024))
    with running(preset, home) as engine:
        scene = Pictures(folder)(prompt(60, 4), png(1), prompt(9, 5))
        image = scene["images"][0]
        clock = Clock(block_s, image.size.n_features * MERGED)
        let_pixels_be_known(engine, image)
        moved(clock, monkeypatch)
        three = [engine.submit(prompt(30, seed), 900) for seed in range(3)]
        engine.finish(engine.submit(**scene, n=1))
        n_answered = [len(engine.tokens(one)) for one in three]
        monkeypatch.undo()
        for one in three:
            engine.engine.cancel(one)
    assert sum(clock.n_rows) == N_BLOCKS * clock.n_patches
    assert all(n_answered), "the three decode meanwhile"
    return clock


@pytest.mark.parametrize(("block_s", "most"), [(0.174, 1), (0.056, 3), (0.016, 12)])
def test_three_agents_decode_on_while_an_image_joins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_s: float, most: int
) -> None:
    """A block of 4 megapixels, 1080p and 720p at 10 TFLOPS; as many fit into the bound."""
    clock = joined(folder, tmp_path, monkeypatch, block_s)
    assert max(clock.n_rows) == most * clock.n_patches
    assert clock.longest_s <= BOUND_S


def test_a_block_longer_than_the_bound_is_cut(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower, "SLICE", 1)
    clock = joined(folder, tmp_path, monkeypatch, 4 * BOUND_S)
    assert clock.longest_s <= BOUND_S


def test_a_longer_prompt_is_answered_while_pixels_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vision_models.build(tmp_path / "vl", "qwen3_vl")
    with running(preset_of(folder, slots=SlotSpec(count=2, n_ctx=1024)), tmp_path) as engine:
        scene = Pictures(folder)(prompt(9, 4), png(1), prompt(9, 5))
        own = done(engine, lambda loop: loop.batch.inputs)
        goes_on = Event()
        assert isinstance(own, ImageEncoder)
        decode = own._decode

        def slow(image: ImageSpan) -> Any:
            assert goes_on.wait(WAIT_S)
            return decode(image)

        monkeypatch.setattr(own, "_decode", slow)
        seeing = engine.submit(**scene)
        wait_until(lambda: bool(own._pixels), "no pixels are asked for")
        assert engine.answer(prompt(600), 4) == engine.cold(prompt(600), 4)
        assert not goes_on.is_set()
        goes_on.set()
        engine.finish(seeing)


def let_pixels_be_known(engine: Driver, image: ImageSpan) -> None:
    """Decode pixels before the requests, so that their thread costs no steps."""
    encoder = done(engine, lambda loop: loop.batch.inputs)
    assert isinstance(encoder, ImageEncoder)
    pixels = encoder._pixels[image.digest] = encoder._pool.submit(encoder._decode, image)
    pixels.result(timeout=WAIT_S)
