"""Images beside slot files, restarts, draft models and MTP heads: tokens as cold and alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from msgspec.structs import replace

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.preset import Speculation
from mlxstack.engine.model.runner import SlotTokens
from mlxstack.features.drafts.engine.mtp_drafter import MTPDrafter
from tests import vision_models
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running
from tests.features.drafts.mtp_models import add_head
from tests.features.vision.test_images_in_slots import COMMON, KINDS, Pictures, counts, png
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx


@pytest.fixture(params=[*COMMON[1:], *in_soak(*sorted({*KINDS} - {*COMMON[1:]}))], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.build(tmp_path_factory.mktemp("models") / "vl", request.param)


def test_a_slot_file_with_images_is_restored_after_a_restart(folder: Path, tmp_path: Path) -> None:
    pictures = Pictures(folder)
    preset = preset_of(folder)
    preset = replace(preset, prefix_cache=replace(preset.prefix_cache, enabled=False))
    parts = (prompt(70), png(1), prompt(30, 1), png(2), prompt(20, 2))
    with running(preset, tmp_path) as engine:
        cold = engine.cold(**pictures(*parts))
        answer = engine.answer(**pictures(*parts), slot=0)
        assert answer == cold
        engine.engine.run_slot_command(SaveSlot(0, "two.bin")).result(WAIT_S)
        turn = pictures(*parts, answer, prompt(9, 3))
        other = pictures(*parts[:3], png(3), prompt(20, 2))
        cold_turn = engine.cold(**turn)
        cold_other = engine.cold(**other)
    with running(preset, tmp_path) as engine:
        engine.engine.run_slot_command(RestoreSlot(1, "two.bin")).result(WAIT_S)
        assert engine.answer(**turn, slot=1) == cold_turn
        assert counts(engine) == (0, 0)
        # The other second image is the only one that is computed.
        engine.engine.run_slot_command(RestoreSlot(1, "two.bin")).result(WAIT_S)
        ask = engine.submit(**other, slot=1)
        engine.finish(ask)
        assert engine.tokens(ask) == cold_other
        assert engine.seated(ask).n_cached <= other["images"][1].start


def answers_of(engine: Driver, pictures: Pictures) -> list[list[int]]:
    """Answers before and after a hit, with text beside."""
    scene = pictures(prompt(60) * 2, png(1), prompt(60))
    asks = [engine.submit(**scene, n=32), engine.submit(prompt(80, 4), n=32)]
    for ask in asks:
        engine.finish(ask)
    first = engine.tokens(asks[0])
    turn = pictures(prompt(60) * 2, png(1), prompt(60), first, png(2), prompt(40, 5))
    return [first, engine.tokens(asks[1]), engine.answer(**turn, n=32)]


def test_a_draft_model_changes_no_token_after_an_image(folder: Path, tmp_path: Path) -> None:
    pictures = Pictures(folder)
    plain = preset_of(folder)
    with running(plain, tmp_path / "plain") as engine:
        wanted = answers_of(engine, pictures)
    drafted = replace(plain, model=replace(plain.model, draft=str(folder)))
    with running(replace(drafted, speculation=Speculation.AUTO), tmp_path / "drafted") as engine:
        draft_freely(engine)
        assert answers_of(engine, pictures) == wanted
        assert engine.engine.snapshot().counters.n_model_drafted_tokens > 0


def test_an_mtp_head_changes_no_token_after_an_image(tmp_path: Path) -> None:
    source = vision_models.build(tmp_path / "vl", "qwen3_5")
    folder = add_head(source, tmp_path / "vl-mtp")
    pictures = Pictures(folder)
    plain = preset_of(folder)
    with running(plain, tmp_path / "plain") as engine:
        wanted = answers_of(engine, pictures)
    with running(replace(plain, speculation=Speculation.AUTO), tmp_path / "drafted") as engine:
        draft_freely(engine)
        assert answers_of(engine, pictures) == wanted
        assert engine.engine.snapshot().counters.n_model_drafted_tokens > 0
        assert not engine.engine.loaded.loop.batch.proposer.model.is_broken


@pytest.mark.parametrize("kind", ["mtp", "model"])
def test_drafters_get_the_placeholder_in_place_of_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = vision_models.build(tmp_path / "vl", "qwen3_5")
    folder = add_head(source, tmp_path / "vl-mtp") if kind == "mtp" else source
    preset = preset_of(folder, speculation=Speculation.AUTO)
    if kind == "model":
        preset = replace(preset, model=replace(preset.model, draft=str(source)))
    scene = Pictures(folder)(prompt(60), png(1), prompt(60, 1))
    seen = []
    with running(preset, tmp_path / "home") as engine:
        draft_freely(engine)
        drafter = engine.engine.loaded.loop.batch.proposer.model
        execute = drafter._runner.execute

        def note(tokens: Sequence[int]) -> None:
            """Before the pass: to gather an embedding at a virtual id ends the process."""
            seen.extend(tokens)
            assert max(tokens) < vision_models.VOCAB

        def followed(context: Any, start: int, states: Any, tokens: Sequence[int]) -> None:
            note(tokens)
            MTPDrafter.observe_prefill(drafter, context, start, states, tokens)

        def executed(plan: Sequence[SlotTokens], *views: Any) -> Any:
            note([token for slot in plan for token in slot.tokens.tolist()])
            return execute(plan, *views)

        if kind == "mtp":
            monkeypatch.setattr(drafter, "observe_prefill", followed)
        else:
            monkeypatch.setattr(drafter._runner, "execute", executed)
        engine.answer(**scene, n=32)
        assert engine.engine.snapshot().counters.n_model_drafted_tokens > 0
    (image,) = scene["images"]
    assert seen.count(drafter.placeholder) >= image.size.n_features
    assert max(seen) < vision_models.VOCAB
