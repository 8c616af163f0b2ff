"""Which image KV belongs to: early turns keep them, and equal ids are no equal images."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from msgspec.structs import force_setattr, replace

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.errors import StackError
from mlxstack.core.preset import SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from tests import vision_models
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.features.vision.test_images_in_slots import COMMON, KINDS, Pictures, png
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

TWO = SlotSpec(count=2, n_ctx=1024)
Scene = dict[str, Any]


@pytest.fixture(params=[*COMMON, *in_soak(*sorted({*KINDS} - {*COMMON}))], scope="module")
def folder(request: Any, tmp_path_factory: Any) -> Path:
    return vision_models.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def pictures(folder: Path) -> Pictures:
    return Pictures(folder)


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    with running(preset_of(folder, slots=TWO), tmp_path) as running_driver:
        yield running_driver


def early(driver: Driver, sampled: Scene, expected: Scene) -> int:
    """Begin a turn early that is not quite what was sampled; the tokens that were computed."""
    ask = driver.submit(**sampled, n=4, slot=0, display_name="agent")
    driver.finish(ask)
    driver.expect(**expected, after=ask, slot=0, display_name="agent")
    driver.catch_up()
    return driver.n_early[0]


def test_the_next_turn_after_an_image_is_the_one_from_cold(
    driver: Driver, pictures: Pictures
) -> None:
    """The thought after the image is dropped, as in a loop of tools."""
    shown = (prompt(40), png(1), prompt(20, 1))
    expected = pictures(*shown, prompt(90, 2))
    assert early(driver, pictures(*shown, prompt(60, 3)), expected) > 0
    following = pictures(*shown, prompt(90, 2), prompt(9, 4))
    assert driver.answer(**following, slot=0, display_name="agent") == driver.cold(**following)
    assert driver.n_early[1] > 0


def test_no_tower_runs_for_a_turn_that_may_never_come(driver: Driver, pictures: Pictures) -> None:
    shown = (png(1), prompt(20, 1))
    expected = pictures(prompt(40), *shown, prompt(60, 2))
    assert early(driver, pictures(prompt(90, 3), *shown), expected) == 0
    following = pictures(prompt(40), *shown, prompt(60, 2), prompt(9, 4))
    assert driver.answer(**following, slot=0) == driver.cold(**following)


def test_an_id_without_its_image_never_reaches_the_model(
    driver: Driver, pictures: Pictures
) -> None:
    scene = pictures(prompt(20), png(1), prompt(9, 1))
    request = Request("lost", PromptTokens(**scene), 4)
    # No way of the package makes this: it is what memory would hold after a fault.
    force_setattr(request.prompt, "images", ())
    driver.engine.submit(request)
    with pytest.raises(StackError, match="belongs to an image"):
        driver.finish("lost")
    assert driver.answer(**scene) == driver.cold(**scene)


def other(scene: Scene, image: bytes, pictures: Pictures) -> Scene:
    """The scene with another image of the same ids, as chance or an attacker finds them."""
    (span,) = scene["images"]
    (theirs,) = pictures(image)["images"]
    assert theirs.size == span.size
    return {**scene, "images": (replace(span, digest=theirs.digest, data=image),)}


def in_the_slot(driver: Driver, _: Scene) -> Scene:
    return {"slot": 0}


def in_another_slot(driver: Driver, _: Scene) -> Scene:
    return {"slot": 1}


def parked(driver: Driver, _: Scene) -> Scene:
    driver.answer(prompt(200, seed=77), 2, slot=0)
    return {"slot": 0}


def from_a_slot_file(driver: Driver, _: Scene) -> Scene:
    driver.engine.run_slot_command(SaveSlot(0, "one.bin")).result(PATIENCE_S)
    driver.answer(prompt(200, seed=78), 2, slot=1)
    driver.engine.run_slot_command(RestoreSlot(1, "one.bin")).result(PATIENCE_S)
    return {"slot": 1}


PLACES: list[Callable[[Driver, Scene], Scene]] = [
    in_the_slot,
    in_another_slot,
    parked,
    from_a_slot_file,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("n_before", [9, 150])
def test_kv_of_an_image_is_not_used_for_another_of_the_same_ids(
    driver: Driver, pictures: Pictures, place: Callable[[Driver, Scene], Scene], n_before: int
) -> None:
    scene = pictures(prompt(n_before), png(1), prompt(40, 1))
    similar = other(scene, png(2), pictures)
    wanted = driver.cold(**similar, salt="cold")
    driver.answer(**scene, slot=0)
    where = place(driver, scene)
    ask = driver.submit(**similar, **where)
    driver.finish(ask)
    assert driver.tokens(ask) == wanted
    assert driver.seated(ask).n_cached <= scene["images"][0].start


def test_kv_on_disk_is_not_used_for_another_image_of_the_same_ids(
    folder: Path, tmp_path: Path, pictures: Pictures
) -> None:
    scene = pictures(prompt(150), png(1), prompt(200, 1))
    similar = other(scene, png(2), pictures)
    with running(preset_of(folder), tmp_path) as driver:
        wanted = driver.cold(**similar, salt="cold")
        again = driver.answer(**scene, agent="a")
        driver.engine.park().result(PATIENCE_S)
    with running(preset_of(folder), tmp_path) as driver:
        ask = driver.submit(**similar)
        driver.finish(ask)
        assert driver.tokens(ask) == wanted
        assert driver.seated(ask).n_cached <= scene["images"][0].start
        # The image that it is of has it.
        same = driver.submit(**scene)
        driver.finish(same)
        assert driver.tokens(same) == again
        assert driver.seated(same).n_cached > scene["images"][0].end


def test_what_several_agents_share_is_learned_up_to_the_first_image(
    folder: Path, tmp_path: Path, pictures: Pictures
) -> None:
    shared = (prompt(300), png(1), prompt(300, 1))
    with running(preset_of(folder), tmp_path) as driver:
        for n in range(4):
            scene = pictures(*shared, prompt(20, 10 + n))
            driver.answer(**scene, agent=f"agent-{n}")
        driver.catch_up()
    with running(preset_of(folder), tmp_path) as driver:
        learned = driver.engine.cache.shared_prefixes().result(PATIENCE_S)
        assert learned
        assert all(prefix == PromptTokens(prompt(300)[: len(prefix.tokens)]) for prefix in learned)
