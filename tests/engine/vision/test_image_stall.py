"""The bound on stalls while an image joins, on a clock that only the work of the engine moves."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from mlxstack.core.image import ImageSpan
from mlxstack.core.preset import PrefillSpec, SlotSpec
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.vision.tower import Encoding
from tests import vision_models
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running
from tests.engine.vision.test_image_memory import done
from tests.engine.vision.test_images_in_slots import Pictures, png

pytestmark = pytest.mark.mlx

N_BLOCKS = 27
STEP_S = 0.025
BOUND_S = PrefillSpec().max_stall_ms / 1000


class Clock:
    """Seconds that decode steps and blocks of the tower have taken."""

    def __init__(self, block_s: float) -> None:
        self.now = 0.0
        self.block_s = block_s
        self.n_blocks: list[int] = []
        """Blocks between two decode steps."""
        self.longest_s = self._decoded_at = 0.0

    def decoded(self) -> None:
        """A step of the decoding requests is over."""
        self.now += STEP_S
        self.longest_s = max(self.longest_s, self.now - self._decoded_at)
        self._decoded_at = self.now
        self.n_blocks.append(0)

    def encoded(self, n_blocks: int) -> None:
        """Blocks of a tower are computed."""
        self.now += n_blocks * self.block_s
        self.n_blocks[-1] += n_blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower of as many blocks as those of Qwen3-VL and SigLIP have."""
    vision = vision_models.QWEN3_VL["vision_config"] | {"depth": N_BLOCKS}
    return vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl", vision=vision)


def moved(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps and blocks move the clock, and the engine read it."""
    step, advance = Batch.step, Encoding.advance

    def decode(batch: Batch, **more: Any) -> Any:
        tokens = step(batch, **more)
        clock.decoded()
        return tokens

    def encode(encoding: Encoding, n_blocks: int) -> bool:
        before = encoding._n_done
        is_complete = advance(encoding, n_blocks)
        clock.encoded(encoding._n_done - before)
        return is_complete

    monkeypatch.setattr(Batch, "step", decode)
    monkeypatch.setattr(Encoding, "advance", encode)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)


@pytest.mark.parametrize(("block_s", "most"), [(0.174, 1), (0.056, 3), (0.016, 12)])
def test_three_agents_decode_on_while_an_image_joins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_s: float, most: int
) -> None:
    """A block of 4 megapixels, 1080p and 720p at 10 TFLOPS; as many fit into the bound."""
    clock = Clock(block_s)
    preset = preset_of(folder, slots=SlotSpec(count=4, n_ctx=1024))
    with running(preset, tmp_path) as engine:
        scene = Pictures(folder)(prompt(60, 4), png(1), prompt(9, 5))
        let_pixels_be_known(engine, scene["images"][0])
        moved(clock, monkeypatch)
        three = [engine.submit(prompt(30, seed), 900) for seed in range(3)]
        engine.finish(engine.submit(**scene, n=1))
        n_answered = [len(engine.tokens(one)) for one in three]
        monkeypatch.undo()
        for one in three:
            engine.engine.cancel(one)
    assert sum(clock.n_blocks) == N_BLOCKS
    assert max(clock.n_blocks) == most
    assert all(n_answered), "the three decode meanwhile"
    assert clock.longest_s <= BOUND_S


def let_pixels_be_known(engine: Driver, image: ImageSpan) -> None:
    """Decode pixels before the requests, so that their thread costs no steps."""
    encoder = done(engine, lambda loop: loop.slot_kv.images)
    assert encoder is not None
    pixels = encoder._pixels[image.digest] = encoder._pool.submit(encoder._decode, image)
    pixels.result(timeout=WAIT_S)
