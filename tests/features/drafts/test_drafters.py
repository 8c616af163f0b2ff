"""DFlash, DFlash2 and EAGLE-3 drafters: equal answers, contexts of their own, tokens accepted.

Those that need mlx-vlm run where the extra more-models is installed (`make models`, `.ci/run`).
The tests of `test_drafts.py` that compare an engine with drafts with one without run here again.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import EraseSlot
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec, Preset, SlotSpec, Speculation
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.loading import loader
from mlxstack.engine.model.mlx_vlm_models import is_installed
from mlxstack.features.drafts.engine import drafter_loading
from mlxstack.features.drafts.engine.block_drafter import MAX_BEHIND, BlockContext, BlockDrafter
from mlxstack.features.drafts.engine.block_model import BlockModel
from mlxstack.features.drafts.engine.draft_loading import load_drafts
from mlxstack.features.drafts.engine.layer_taps import LayerTaps
from mlxstack.features.drafts.engine.mtp_drafter import MTPContext, MTPDrafter
from mlxstack.features.drafts.engine.mtp_head import parts_of
from mlxstack.host.load_progress import LoadProgress
from mlxstack.models.drafter_configs import DrafterKind, eagle_config
from mlxstack.models.model_files import read_config
from mlxstack.planner.candidate import of_files
from mlxstack.policy.pass_layout import RowMode
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running
from tests.features.drafts.drafter_models import BLOCK, add_drafter
from tests.features.drafts.test_drafts import (
    test_answers_are_the_same_with_drafts_alone_and_in_a_batch,
    test_forks_turns_and_parked_contexts_go_on_as_without_drafts,
    test_guided_answers_are_the_same_beside_free_ones,
    test_limits_and_ends_are_where_they_are_without_drafts,
)
from tests.models import LLAMA, write
from tests.real import train_drafter
from tests.repetition import in_soak

__all__ = [
    "test_answers_are_the_same_with_drafts_alone_and_in_a_batch",
    "test_forks_turns_and_parked_contexts_go_on_as_without_drafts",
    "test_guided_answers_are_the_same_beside_free_ones",
    "test_limits_and_ends_are_where_they_are_without_drafts",
]

pytestmark = pytest.mark.mlx

with_extra = pytest.mark.skipif(not is_installed(), reason="it needs the extra more-models")
without_extra = pytest.mark.skipif(is_installed(), reason="the extra more-models is installed")

KINDS = tuple(DrafterKind)
PAIRS = [
    "tiny + DFlash2",
    "qwen3 + DFlash",
    "tiny + EAGLE-3",
    *in_soak(
        "qwen3 + DFlash2",
        "tiny + DFlash",
        "qwen3 + EAGLE-3",
        *(
            f"{kind} + {own.value}"
            for kind in ("tiny-hybrid", "tiny-swa", "tiny-mla")
            for own in KINDS
        ),
    ),
]
"""Targets of full attention and, in soak, of recurrent layers, windows and latent attention."""


@pytest.fixture(scope="session")
def target_of(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The folder of a tiny target by its kind."""
    root = tmp_path_factory.mktemp("targets")

    def folder(kind: str) -> Path:
        if kind != "qwen3":
            return model_of(kind)
        path = root / kind
        return path if path.exists() else write(path, LLAMA | {"model_type": kind})

    return folder


def drafted_by(target: Path, drafter: Path, n_slots: int = 4, n_ctx: int = 1024) -> Preset:
    """A preset with a drafter."""
    slots = SlotSpec(count=n_slots, n_ctx=n_ctx)
    preset = preset_of(target, slots=slots, speculation=Speculation.AUTO)
    return replace(preset, model=replace(preset.model, draft=str(drafter)))


def drafts_in(driver: Driver) -> Any:
    return driver.engine.loaded.loop.batch.proposer.model


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, target_of: ModelOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, Driver]]:
    """Engines with and without a drafter; the first drafts whatever a pass costs."""
    if not is_installed():
        pytest.skip("it needs the extra more-models")
    kind, _, name = request.param.partition(" + ")
    target = target_of(kind)
    drafter = add_drafter(target, tmp_path_factory.mktemp("drafter") / name, DrafterKind(name))
    preset = drafted_by(target, drafter, n_slots=8, n_ctx=512)
    without = replace(preset, speculation=Speculation.OFF, model=ModelSpec(id=str(target)))
    homes = [tmp_path_factory.mktemp("home") for _ in range(2)]
    with running(preset, homes[0]) as auto, running(without, homes[1]) as off:
        draft_freely(auto)
        yield auto, off
        drafts = drafts_in(auto)
        assert drafts.n_drafted > 300 and not drafts.is_broken
        assert isinstance(drafts, MTPDrafter if name == "EAGLE-3" else BlockDrafter)


def test_a_batch_of_four_joins_and_leaves_after_hits_cuts_and_forks(
    pair: tuple[Driver, Driver],
) -> None:
    """More than a thousand tokens, each compared with the one computed cold and alone."""
    auto, off = pair
    n_compared = 0
    contexts = [prompt(70 + 20 * n, seed=40 + n) for n in range(4)]
    for n_turn in range(4):
        asks = []
        for n, head in enumerate(contexts):
            tail = prompt(5 + 3 * n, seed=10 * n_turn + n)
            # The last one goes on from the first one's beginning, the third is cut.
            begin = (contexts[0][:60], head, head[: len(head) - 9])[(n == 1) + 2 * (n == 2)]
            tokens = (begin if n_turn % 2 else head) + tail
            contexts[n] = tokens
            asks.append(auto.submit(tokens, 14 + 9 * n, agent=f"agent-{n}"))
        gone = auto.submit(prompt(40, seed=n_turn), 200, use_cache=False)
        for ask in asks:
            auto.finish(ask)
        auto.engine.cancel(gone)
        for n, ask in enumerate(asks):
            answer = auto.tokens(ask)
            assert answer == off.cold(contexts[n], 14 + 9 * n)
            n_compared += len(answer)
            contexts[n] += tuple(answer)
    assert n_compared >= 400
    for n, head in enumerate(contexts):
        again = head[:200] + prompt(4, seed=n)
        answer = auto.answer(again, 150, agent=f"agent-{n}")
        assert answer == off.cold(again, 150)
        n_compared += len(answer)
    assert n_compared >= 1000


@with_extra
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_answers_go_on_as_without_drafts(
    target_of: ModelOf, tmp_path: Path, kind: DrafterKind
) -> None:
    target = target_of("tiny")
    preset = drafted_by(target, add_drafter(target, tmp_path / "drafter", kind))
    first = prompt(300, seed=3)
    answers = []
    for _ in range(2):
        with running(preset, tmp_path / "home") as driver:
            draft_freely(driver)
            tokens = first
            for n_turn in range(3):
                answers.append(driver.answer(tokens, 20, agent="a"))
                tokens += tuple(answers[-1]) + prompt(9, seed=n_turn)
            first = tokens
            driver.catch_up()
            assert drafts_in(driver).n_drafted > 0
    with running(preset_of(target), tmp_path / "other") as off:
        tokens = prompt(300, seed=3)
        for n_turn, answer in enumerate(answers):
            assert answer == off.cold(tokens, 20)
            tokens += tuple(answer) + prompt(9, seed=n_turn % 3)


class Reference:
    """A drafter as mlx-vlm runs it, over all outputs of the target at once."""

    def __init__(self, target: Path, folder: Path, kind: DrafterKind) -> None:
        self.model = loader.load(ModelSpec(id=str(target)), KVSpec()).model
        self.config = json.loads((folder / "config.json").read_text())
        parts = parts_of(self.model)
        assert parts is not None
        self.parts = parts
        self.kind = kind
        config = dict(self.config)
        if kind is DrafterKind.EAGLE3:
            config = eagle_config(config, len(self.model.layers))
        self.drafter, args = drafter_loading._built(kind, config)
        sanitize: Callable[[Any], Any] = self.drafter.sanitize
        if kind is DrafterKind.EAGLE3:
            sanitize = lambda raw: drafter_loading._eagle_weights(self.drafter, raw)  # noqa: E731
        drafter_loading._load(self.drafter, folder, self.config, sanitize)
        self.drafter.embed_tokens = parts.embed
        self.drafter.lm_head = getattr(self.drafter, "lm_head", None) or parts.head
        ids = args.capture_layer_ids if kind is DrafterKind.EAGLE3 else args.target_layer_ids
        self.taps = LayerTaps(parts, self.model.layers, ids)

    def features(self, tokens: Sequence[int], start: int = 0) -> mx.array:
        """Outputs of layers at the tokens from `start` on."""
        states = self.taps.parts.trunk(mx.array([list(tokens)]))
        return self.taps.taken(states)[0, start:]

    def draft(self, tokens: list[int], n: int, start: int = 0) -> list[int]:
        """The `n` tokens after `tokens`, of which the first `start` were not computed here."""
        features = self.features(tokens[:-1], start)[None]

        def greedy(logits: mx.array) -> mx.array:
            return mx.argmax(logits, axis=-1)

        if self.kind is not DrafterKind.EAGLE3:
            block = self.drafter.draft_block(
                tokens[-1], features, self.drafter.make_cache(), n + 1, greedy
            )
            return np.array(block)[0].tolist()
        self.drafter._cache = self.drafter.make_cache()
        self.drafter._seed_token = None
        self.drafter.prefill_from_target_hidden(
            mx.array([tokens[start:-1]]), features, tokens[-1], greedy, greedy=True
        )
        block = self.drafter.draft_block(None or 0, None, None, n + 1, greedy, greedy=True)
        return np.array(block)[0].tolist()


class Drafted(Struct, frozen=True):
    """A draft, the tokens before it, and the start of its context."""

    known: list[int]
    tokens: list[int]
    start: int
    n_block: int
    """Tokens of the longest draft of its pass, of which a shorter one is the beginning."""


def drafts_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Drafts from now on."""
    model = drafts_in(driver)
    found: list[Drafted] = []
    draft = model.draft

    def record(rows: Any, counts: Any) -> Any:
        known = [[*row.context.tokens, *row.known] for row in rows]
        starts = [row.context.companion.start for row in rows]
        drafts = draft(rows, counts)
        for before, tokens, start in zip(known, drafts, starts, strict=True):
            found.append(Drafted(before, tokens, start, max(counts)))
        return drafts

    monkeypatch.setattr(model, "draft", record)
    return found


@with_extra
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_published_class(
    target_of: ModelOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: DrafterKind,
    is_ahead: bool,
) -> None:
    """Cold, after a hit, a cut and a turn; alone and beside others."""
    target = target_of("tiny")
    more = {} if kind is DrafterKind.EAGLE3 else {"layer_types": ["full_attention"] * 2}
    folder = add_drafter(target, tmp_path / "drafter", kind, **more)
    reference = Reference(target, folder, kind)
    with running(drafted_by(target, folder), tmp_path / "home") as driver:
        draft_freely(driver)
        monkeypatch.setattr(driver.engine.loaded.loop.batch, "is_ahead", is_ahead)
        drafts = drafts_of(driver, monkeypatch)
        prompts = [prompt(n, seed=n) for n in (40, 150, 97)]
        asks = [driver.submit(tokens, 12, slot=n) for n, tokens in enumerate(prompts)]
        for ask in asks:
            driver.finish(ask)
        again = prompts[1] + tuple(driver.tokens(asks[1])) + prompt(30, seed=5)
        driver.answer(again, 12, slot=1)
        if kind is not DrafterKind.EAGLE3:
            # A pair of EAGLE-3 lacks the state before the cut.
            driver.answer(again[:100] + prompt(30, seed=6), 12, slot=1)
        first = prompt(256, seed=1)
        for tokens in (first, prompt(256, seed=2)):
            driver.answer(tokens, 4, slot=0)
        driver.catch_up()
        driver.answer(first + prompt(40, seed=9), 12, slot=0)
        assert not drafts_in(driver).is_broken
    assert len(drafts) > 20
    assert any(draft.start for draft in drafts)
    for draft in drafts[::3]:
        expected = reference.draft(draft.known, draft.n_block, draft.start)
        assert draft.tokens == expected[: len(draft.tokens)]


@with_extra
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_see_the_context_within_the_window(
    target_of: ModelOf, tmp_path: Path, is_causal: bool
) -> None:
    """One layer of DFlash: its masks see what their own window holds, and of the block."""
    target = target_of("tiny")
    window = 16
    more = {
        "layer_types": ["sliding_attention"],
        "num_hidden_layers": 1,
        "sliding_window": window,
        "is_causal": is_causal,
    }
    folder = add_drafter(target, tmp_path / "drafter", DrafterKind.DFLASH, **more)
    reference = Reference(target, folder, DrafterKind.DFLASH)
    model = BlockModel(reference.drafter, reference.parts, is_causal)
    n_known = 40
    features = mx.random.normal((n_known, model.features_width), key=mx.random.key(1))

    def hidden(changed: mx.array, anchor: int = 7) -> mx.array:
        caches = model.new_caches()
        model.extend(caches, changed[:17])
        model.extend(caches, changed[17:])
        others = model.new_caches()
        model.extend(others, changed[:5])
        return model.hidden(mx.array([9, anchor]), [others, caches], BLOCK - 1)[1]

    def differs(one: mx.array) -> list[bool]:
        seen: list[bool] = (mx.abs(one - hidden(features)).max(axis=-1) > 1e-6).tolist()  # type: ignore[assignment]
        return seen

    for position in range(n_known - 2 * window, n_known):
        changed = mx.array(features)
        changed[position] += 1.0
        # Mask i stands at n_known + 1 + i.
        expected = [n_known + 1 + i - position < window for i in range(BLOCK - 1)]
        assert differs(hidden(changed)) == expected, position
    assert differs(hidden(features, anchor=8)) == [True] * (BLOCK - 1)


@with_extra
@pytest.mark.parametrize("kind", [DrafterKind.DFLASH2, DrafterKind.EAGLE3])
def test_contexts_are_counted_and_go_with_their_slots(
    target_of: ModelOf, tmp_path: Path, kind: DrafterKind
) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", kind)
    with running(drafted_by(target, folder), tmp_path / "home") as driver:
        first = prompt(90, seed=7)
        answer = driver.answer(first, 30, slot=1)
        slot_kv = driver.engine.loaded.loop.slot_kv
        context = slot_kv.slots[1]
        assert isinstance(context.companion, BlockContext | MTPContext)
        assert context.companion.start == 0
        assert context.companion_bytes == context.companion.n_bytes > 0
        assert slot_kv.bytes_per_token > drafts_in(driver).bytes_per_token > 0
        held = context.companion
        again = first + tuple(answer) + prompt(20, seed=12)
        driver.answer(again, 20, slot=1)
        assert context.companion is held
        driver.answer(again[:100] + prompt(9, seed=3), 8, slot=2)
        forked = slot_kv.slots[2].companion
        assert forked is not None and forked is not held
        driver.engine.run_slot_command(EraseSlot(1)).result(timeout=WAIT_S)
        assert context.companion is None
        driver.engine.cache.reclaim(1).result(timeout=WAIT_S)
        assert slot_kv.slots[2].companion is None


@with_extra
def test_positions_wait_for_a_draft_and_are_computed_when_there_are_many(
    target_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", DrafterKind.DFLASH)
    with running(drafted_by(target, folder), tmp_path / "home") as driver:
        monkeypatch.setattr(drafts_in(driver), "plan", lambda *_: {})
        driver.answer(prompt(50, seed=2), 2 * MAX_BEHIND, slot=0)
        known = driver.engine.loaded.loop.slots[0].companion
        assert known.start == 0
        assert known.n_behind <= MAX_BEHIND
        assert known.n_held > 50 + MAX_BEHIND // 2
        for n_dropped in (1, 2, known.n_behind + 3):
            end = known.end - n_dropped
            known.rewind(end)
            assert known.end == end
        assert known.n_behind == 0
        known.rewind(0)
        assert known.end == known.n_held == 0


@with_extra
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_drafter_fails_no_request(
    target_of: ModelOf, tmp_path: Path, kind: DrafterKind
) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", kind)
    with running(drafted_by(target, folder), tmp_path / "home") as driver:
        draft_freely(driver)
        tokens = prompt(30, seed=2)
        expected = driver.cold(tokens, 24)
        drafts = drafts_in(driver)
        assert driver.engine.snapshot().draft_model == str(folder)
        broken = drafts._head.drafter if kind is DrafterKind.EAGLE3 else drafts._model._drafter
        broken.fc = None
        assert driver.cold(tokens, 24) == expected
        assert drafts.is_broken
        assert driver.engine.snapshot().draft_model is None
        assert driver.cold(tokens, 24) == expected


@with_extra
def test_a_drafter_that_knows_a_text_saves_passes(target_of: ModelOf, tmp_path: Path) -> None:
    """Trained for some seconds on one answer; what it drafts of that answer is accepted."""
    target = target_of("tiny")
    tokens = prompt(60, seed=8)
    folder = tmp_path / "drafter"
    n_answer = 100
    trained_on(target, tokens, n_answer, folder)
    with running(drafted_by(target, folder), tmp_path / "home") as driver:
        draft_freely(driver)
        before = driver.engine.snapshot().counters
        answer = driver.cold(tokens, n_answer)
        after = driver.engine.snapshot().counters
        drafts = drafts_in(driver)
        assert drafts.n_accepted >= 0.6 * n_answer
        assert drafts.n_accepted >= 0.7 * drafts.n_drafted
        assert after.n_decode_calls - before.n_decode_calls <= 0.5 * n_answer
        # Beside others, each of which has a context of its own.
        asks = [driver.submit(tokens, n_answer, use_cache=False)]
        asks += [driver.submit(prompt(50, seed=n), 40, use_cache=False) for n in range(3)]
        for ask in asks:
            driver.finish(ask)
        assert driver.tokens(asks[0]) == answer
        assert drafts.n_accepted >= 1.2 * n_answer
    with running(preset_of(target), tmp_path / "other") as off:
        assert off.cold(tokens, n_answer) == answer


def trained_on(folder: Path, tokens: tuple[int, ...], n_answer: int, out: Path) -> None:
    """Write a DFlash2 drafter that was trained on the answer to one prompt."""
    target = train_drafter.Target(folder, [0, 2])
    data = target.continued(np.array([tokens]), n_answer, is_edit=False)
    config = train_drafter.config_of(target, Namespace(layers=1, block=BLOCK, taps=[0, 2]))
    mx.random.seed(4)
    drafter = train_drafter.new_drafter(target, config)
    random = np.random.default_rng(1)
    n_vocab = config["vocab_size"]
    every = np.arange(n_vocab)
    table = target.model.model.embed_tokens.weight
    embed = target.plain.embed

    def loss_of(model: Any, batch: Any) -> mx.array:
        return train_drafter.loss_of(model, embed, table, batch)

    step = nn.value_and_grad(drafter, loss_of)
    optimizer = optimizers.AdamW(3e-3)
    for _ in range(150):
        batch = train_drafter.batch_of(data, random, BLOCK, every, n_vocab, len(tokens) - 2)
        loss, gradients = step(drafter, batch)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(drafter, gradients)
        mx.eval(drafter.parameters(), optimizer.state, loss)
    train_drafter.save(drafter, config, out, {"loss": loss.item()})


WRONG: list[tuple[DrafterKind, dict[str, Any], str]] = [
    (DrafterKind.DFLASH2, {"num_target_layers": 9}, "for 9 layers, and the model has 4"),
    (DrafterKind.DFLASH, {"dflash_config": None}, "no dflash_config"),
    (
        DrafterKind.DFLASH,
        {"dflash_config": {"mask_token_id": 1024, "target_layer_ids": [0, 2]}},
        "mask is token 1024 of 1024",
    ),
    (DrafterKind.DFLASH, {"intermediate_size": 95}, r"Expected shape \(95, 64\)"),
    (
        DrafterKind.EAGLE3,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}},
        r"layers \[0, 1, 39\] of 4",
    ),
]


@with_extra
@pytest.mark.parametrize(("kind", "spoiled", "why"), WRONG)
def test_a_drafter_of_another_model_is_refused(
    target_of: ModelOf, tmp_path: Path, kind: DrafterKind, spoiled: dict[str, Any], why: str
) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", kind)
    config = json.loads((folder / "config.json").read_text()) | spoiled
    (folder / "config.json").write_text(json.dumps(config))
    begin = rf"model\.draft: .* is a {kind.value} drafter that does not fit .*"
    with pytest.raises(SetupError, match=begin + why):
        load(target, folder)


@with_extra
def test_hidden_sizes_are_compared(target_of: ModelOf, tmp_path: Path) -> None:
    wide = write(tmp_path / "wide", LLAMA | {"hidden_size": 96})
    for kind in KINDS:
        folder = add_drafter(wide, tmp_path / kind.value, kind, num_target_layers=4)
        with pytest.raises(SetupError, match=rf"is a {kind.value} drafter that does not fit"):
            load(target_of("tiny"), folder)


def load(target: Path, drafter: Path, *, has_states: bool = True) -> Any:
    preset = drafted_by(target, drafter)
    loaded = loader.load(ModelSpec(id=str(target)), KVSpec())
    check = BatchingCheck(RowMode.RAGGED, None, "", can_draft=True)
    progress = LoadProgress()
    return load_drafts(preset, loaded, check, lambda *_: check, progress, has_states=has_states)


@without_extra
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_extra_a_drafter_is_refused_with_the_command_that_adds_it(
    target_of: ModelOf, tmp_path: Path, kind: DrafterKind
) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", kind)
    why = rf"model\.draft: .* is a {kind.value} drafter.*pip install '\.\[more-models\]'"
    with pytest.raises(SetupError, match=why):
        load(target, folder)


def test_a_drafter_of_another_kind_is_refused(target_of: ModelOf, tmp_path: Path) -> None:
    target = target_of("tiny")
    folder = add_drafter(
        target, tmp_path / "drafter", DrafterKind.DFLASH, architectures=["Qwen3DSparkModel"]
    )
    with pytest.raises(SetupError, match=r"model\.draft: .* another kind than DFlash, DFlash2"):
        load(target, folder)


def test_several_hosts_bring_no_states_together(target_of: ModelOf, tmp_path: Path) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", DrafterKind.DFLASH)
    with pytest.raises(SetupError, match=r"model\.draft: .* several hosts"):
        load(target, folder, has_states=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_a_drafter_and_its_contexts(
    target_of: ModelOf, tmp_path: Path, kind: DrafterKind
) -> None:
    target = target_of("tiny")
    folder = add_drafter(target, tmp_path / "drafter", kind)
    candidate = of_files(drafted_by(target, folder), read_config(target))
    assert candidate.draft is not None
    n_layers = 1 if kind is DrafterKind.EAGLE3 else 2
    assert len(candidate.load().draft.layers) == n_layers
    without = of_files(preset_of(target), read_config(target))
    file = folder / "model.safetensors"
    more = candidate.load().weights - without.load().weights
    assert more == pytest.approx(file.stat().st_size, rel=0.1)
