"""A draft model saves passes, keeps to its slots, and fails nothing when it fails."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxstack.core.commands import EraseSlot
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec, SlotSpec, Speculation
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.batching_check import BatchingCheck, self_check
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.features.drafts.engine.draft_loading import load_drafts
from mlxstack.features.drafts.engine.small_model import MAX_LACKING
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.pass_layout import RowMode
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running

pytestmark = pytest.mark.mlx


def drafted_by(model: Path, draft: str) -> Any:
    preset = preset_of(model, slots=SlotSpec(count=4, n_ctx=1024), speculation=Speculation.AUTO)
    return replace(preset, model=replace(preset.model, draft=draft))


@pytest.fixture(scope="module")
def driver(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A model with windows that drafts for itself, whatever a pass of the target costs."""
    preset = drafted_by(model_of("tiny-swa"), str(model_of("tiny-swa")))
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        draft_freely(found)
        yield found


def contexts(driver: Driver) -> list[Any]:
    return list(driver.engine.loaded.loop.slots)


def test_a_model_that_knows_the_answers_saves_most_passes(driver: Driver) -> None:
    check_passes(driver)
    assert driver.engine.snapshot().draft_model == driver.engine.preset.model.draft


@pytest.mark.parametrize("kind", ["tiny-hybrid", "tiny-mla"])
def test_refused_tokens_leave_no_trace_in_its_context(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    """Sampled answers refuse greedy drafts; after them greedy ones are foreseen as before."""
    with running(drafted_by(model_of(kind), str(model_of(kind))), tmp_path) as driver:
        draft_freely(driver)
        tokens = prompt(50, seed=3)
        model = driver.engine.loaded.loop.batch.proposer.model
        warm = driver.answer(tokens, 30, slot=0, sampling=SamplingParams(temperature=0.7, seed=1))
        assert 0 < model.n_accepted < model.n_drafted
        draft_freely(driver)
        check_passes(driver, tokens + tuple(warm))


def check_passes(driver: Driver, *prompts: tuple[int, ...]) -> None:
    """Nearly all tokens of the draft model are accepted, and most passes are saved."""
    before = driver.engine.snapshot().counters
    drawn = [prompt(40 + 30 * n, seed=n) for n in range(3)]
    asks = [driver.submit(tokens, 60) for tokens in prompts or drawn]
    ends = [driver.finish(ask) for ask in asks]
    after = driver.engine.snapshot().counters
    drafted = after.n_model_drafted_tokens - before.n_model_drafted_tokens
    accepted = after.n_model_accepted_tokens - before.n_model_accepted_tokens
    assert accepted >= 0.95 * drafted
    assert accepted >= 0.6 * sum(end.timings.n_generated for end in ends)
    assert after.n_decode_calls - before.n_decode_calls <= 0.5 * 60
    assert drafted <= sum(end.timings.n_drafted for end in ends)


def test_its_contexts_are_counted_and_begin_as_the_slots_do(driver: Driver) -> None:
    driver.answer(prompt(90, seed=7), 30, slot=1)
    slot_kv = driver.engine.loaded.loop.slot_kv
    context = contexts(driver)[1]
    assert context.companion.tokens == context.tokens[: len(context.companion)]
    assert len(context) - len(context.companion) <= MAX_LACKING
    assert context.n_bytes - context.companion_bytes < slot_kv.live_bytes
    assert 0 < context.companion_bytes == context.companion.n_bytes
    with_drafts = slot_kv.live_bytes
    gone = sum(one.companion_bytes for one in contexts(driver))
    driver.engine.cache.reclaim(1).result(timeout=WAIT_S)
    assert all(one.companion is None for one in contexts(driver))
    assert slot_kv.live_bytes <= with_drafts - gone


def test_a_step_that_was_scheduled_ahead_is_read_before_rows_are_drafted_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(50 + 20 * n, seed=20 + n) for n in range(3)]
    expected = [driver.cold(tokens, 40) for tokens in prompts]
    before = driver.engine.snapshot().counters.n_model_accepted_tokens
    monkeypatch.setattr(driver.engine.loaded.loop.batch, "is_ahead", True)
    asks = [driver.submit(tokens, 40, use_cache=False) for tokens in prompts]
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == expected
    assert driver.engine.snapshot().counters.n_model_accepted_tokens - before > 40


def test_they_go_where_the_slot_goes(driver: Driver) -> None:
    first = prompt(80, seed=11)
    answer = driver.answer(first, 20, slot=2, agent="a")
    held = contexts(driver)[2].companion
    assert held is not None
    again = first + tuple(answer) + prompt(20, seed=12)
    warm = driver.answer(again, 20, slot=2, agent="a")
    assert contexts(driver)[2].companion is held
    assert warm == driver.cold(again, 20, slot=3)
    other = prompt(70, seed=13)
    assert driver.answer(other, 20, slot=2, agent="b") == driver.cold(other, 20, slot=3)
    assert contexts(driver)[2].companion is not held
    driver.engine.run_slot_command(EraseSlot(2)).result(timeout=WAIT_S)
    assert contexts(driver)[2].companion is None


def test_without_room_nothing_is_drafted_and_nothing_is_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_kv = driver.engine.loaded.loop.slot_kv
    driver.engine.cache.reclaim(1).result(timeout=WAIT_S)
    tokens = prompt(100, seed=15)
    expected = driver.cold(tokens, 20, slot=3)
    driver.engine.run_slot_command(EraseSlot(3)).result(timeout=WAIT_S)
    driver.engine.cache.reclaim(1).result(timeout=WAIT_S)
    monkeypatch.setattr(
        slot_kv.prefix_cache, "budget", slot_kv.live_bytes + slot_kv.bytes_per_token * 512
    )
    assert driver.cold(tokens, 20, slot=3) == expected
    assert contexts(driver)[3].companion is None


def test_a_broken_draft_model_fails_no_request(model_of: ModelOf, tmp_path: Path) -> None:
    folder = model_of("tiny")
    with running(drafted_by(folder, str(folder)), tmp_path) as driver:
        batch = driver.engine.loaded.loop.batch
        draft_freely(driver)
        tokens = prompt(30, seed=2)
        expected = driver.cold(tokens, 24)
        batch.proposer.model._runner.model = None
        assert driver.cold(tokens, 24) == expected
        assert batch.proposer.model.is_broken
        assert driver.engine.snapshot().draft_model is None
        n_drafted = batch.proposer.model.n_drafted
        assert driver.cold(tokens, 24) == expected
        assert batch.proposer.model.n_drafted == n_drafted > 0


def test_other_vocabularies_missing_models_and_unfit_targets_are_refused(
    model_of: ModelOf, tmp_path: Path
) -> None:
    target = model_of("tiny")
    other = tmp_path / "other"
    shutil.copytree(target, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for draft, text in (
        (str(other), r"model\.draft: .* another vocabulary .*token 3.. is .* same family"),
        (str(tmp_path / "none"), r"model\.draft: there is no folder"),
    ):
        with pytest.raises(SetupError, match=text), running(drafted_by(target, draft), tmp_path):
            pass
    loaded = loader.load(ModelSpec(id=str(target)), KVSpec())
    unfit = BatchingCheck(RowMode.ALONE, "the row view cannot serve it", "")
    for key in ("draft", "mtp"):
        preset = preset_of(target)
        preset = replace(preset, model=replace(preset.model, **{key: str(target)}))
        why = rf"cannot use drafts: the row view .*remove model\.{key}"
        with pytest.raises(SetupError, match=why):
            load_drafts(preset, loaded, unfit, checked, LoadProgress(), has_states=True)


def checked(loaded: LoadedModel, factory: CacheFactory) -> BatchingCheck:
    return self_check(loaded.model, factory, loaded.facts.n_vocab)
