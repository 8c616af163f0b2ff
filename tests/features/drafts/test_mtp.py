"""MTP heads draft what they predict, and follow their slots."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import convert
from mlx_lm import utils as mlx_utils
from mlx_lm.models.cache import make_prompt_cache
from msgspec.structs import replace

from mlxstack.core.commands import EraseSlot
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec, Preset, SlotSpec, Speculation
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.features.drafts.engine import draft_loading
from mlxstack.features.drafts.engine.mtp_drafter import NAME, MTPContext
from mlxstack.features.drafts.engine.mtp_head import load_head, parts_of
from mlxstack.models.model_files import measured, read_config
from mlxstack.planner.candidate import Candidate, of_files
from mlxstack.policy.memory.capacity import Weights
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running
from tests.features.drafts.mtp_models import CONVERTED, FILE, add_head, random_head
from tests.hub import MODEL, files_of, serving
from tests.matrix.builder import build
from tests.matrix.configs import config_of
from tests.models import HYBRID, write
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

KINDS = ["tiny-hybrid", "tiny-mla", *in_soak("tiny")]


def with_head(model_of: ModelOf, kind: str) -> Path:
    """The folder of a tiny model with a head."""
    source = model_of(kind)
    folder = source.with_name(f"{kind}-mtp")
    return folder if folder.exists() else add_head(source, folder)


def drafting(model: Path) -> Any:
    slots = SlotSpec(count=4, n_ctx=1024)
    return preset_of(model, slots=slots, speculation=Speculation.AUTO)


def load(folder: Path) -> tuple[Any, Any]:
    model, _ = mlx_utils.load_model(folder)
    head = load_head(model, folder)
    assert head is not None
    return model, head


class Predictions:
    """A head run over all pairs of a conversation at once, without a cache."""

    def __init__(self, folder: Path) -> None:
        self.model, self.head = load(folder)

    def draft(
        self, tokens: list[int], n: int, start: int = 0, missing: int | None = None
    ) -> list[int]:
        """The `n` tokens after `tokens`, of which the first `start` were not computed here.

        The state of the token at `missing` is not known.
        """
        states = self.head.target.trunk(mx.array([tokens]))[0, start:-1]
        if missing is not None:
            states[missing] = 0
        drafted: list[int] = []
        pairs = self.head.features(mx.array(tokens[start + 1 :]), states)
        for _ in range(n):
            out = self.head.states(pairs[None], make_prompt_cache(self.head))[:, -1]
            drafted.append(int(mx.argmax(self.head.logits(out)).item().real))
            new = self.head.features(mx.array(drafted[-1:]), out)
            pairs = mx.concatenate([pairs, new])
        return drafted

    def answer(self, tokens: tuple[int, ...], n: int) -> list[int]:
        """The model's own greedy answer, without drafts."""
        said: list[int] = []
        cache = make_prompt_cache(self.model)
        new = list(tokens)
        for _ in range(n):
            logits = self.model(mx.array([new]), cache=cache)[0, -1]
            new = [int(mx.argmax(logits).item().real)]
            said += new
        return said


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, model_of: ModelOf) -> Path:
    return with_head(model_of, request.param)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with running(drafting(folder), tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def driver(engine: Driver) -> Driver:
    draft_freely(engine)
    return engine


@pytest.fixture(scope="module")
def predictions(folder: Path) -> Predictions:
    return Predictions(folder)


def drafts_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """What the head drafts from now on, each after the tokens it followed."""
    model = driver.engine.loaded.loop.batch.proposer.model
    found = []
    draft = model.draft

    def record(rows: Any, counts: Any) -> Any:
        known = [[*row.context.tokens, *row.known] for row in rows]
        drafts = draft(rows, counts)
        found.extend(zip(known, drafts, strict=True))
        return drafts

    monkeypatch.setattr(model, "draft", record)
    return found


@pytest.mark.parametrize("is_ahead", [False, True])
def test_drafts_are_what_the_head_predicts(
    driver: Driver, predictions: Predictions, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """Also where steps are scheduled ahead, as on a GPU."""
    monkeypatch.setattr(driver.engine.loaded.loop.batch, "is_ahead", is_ahead)
    drafts = drafts_of(driver, monkeypatch)
    prompts = [prompt(n, seed=n) for n in (40, 150, 97)]
    asks = [driver.submit(tokens, 12, use_cache=False) for tokens in prompts]
    for ask in asks:
        driver.finish(ask)
    assert len(drafts) > 10
    for known, drafted in drafts[::3]:
        assert predictions.draft(known, len(drafted)) == drafted
    for tokens, ask in zip(prompts, asks, strict=True):
        assert driver.tokens(ask) == predictions.answer(tokens, 12)
    assert driver.engine.snapshot().draft_model == NAME
    assert not driver.engine.loaded.loop.batch.proposer.model.is_broken


def test_a_few_steps_ahead_may_pass_before_a_draft(
    driver: Driver, predictions: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where few rows are drafted for, pairs of steps that were scheduled ahead wait."""
    batch = driver.engine.loaded.loop.batch
    monkeypatch.setattr(batch, "is_ahead", True)
    drafts = drafts_of(driver, monkeypatch)
    n_plans = 0
    plan = batch.proposer.model.plan

    def seldom(*given: Any) -> Any:
        nonlocal n_plans
        n_plans += 1
        return plan(*given) if n_plans % 12 < 2 else {}

    monkeypatch.setattr(batch.proposer.model, "plan", seldom)
    tokens = prompt(60, seed=6)
    ask = driver.submit(tokens, 60, use_cache=False)
    driver.finish(ask)
    assert len(drafts) > 2
    for known, drafted in drafts:
        assert predictions.draft(known, len(drafted)) == drafted
    assert driver.tokens(ask) == predictions.answer(tokens, 60)


def test_after_a_hit_the_head_sees_what_was_computed_since(
    driver: Driver, predictions: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prompt(256, seed=1)
    driver.answer(first, 4, slot=0)
    driver.answer(prompt(256, seed=2), 4, slot=0)
    driver.catch_up()
    drafts = drafts_of(driver, monkeypatch)
    again = first + prompt(30, seed=3)
    ask = driver.submit(again, 12, slot=1)
    driver.finish(ask)
    n_cached = driver.seated(ask).n_cached
    assert n_cached >= 128
    assert drafts
    for known, drafted in drafts:
        assert predictions.draft(known, len(drafted), n_cached) == drafted


def test_a_next_turn_in_its_slot_goes_on_with_all_pairs(
    driver: Driver, predictions: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prompt(150, seed=4)
    answer = driver.answer(first, 20, slot=2, agent="a")
    drafts = drafts_of(driver, monkeypatch)
    again = first + tuple(answer) + prompt(40, seed=5)
    ask = driver.submit(again, 12, slot=2, agent="a")
    driver.finish(ask)
    assert driver.seated(ask).n_cached >= len(first)
    assert drafts
    for known, drafted in drafts:
        assert predictions.draft(known, len(drafted)) == drafted


def test_an_edited_prompt_keeps_the_pairs_before_the_edit(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_head(model_of, "tiny")
    with running(drafting(folder), tmp_path) as driver:
        draft_freely(driver)
        first = prompt(150, seed=4)
        driver.answer(first, 20, slot=2, agent="a")
        drafts = drafts_of(driver, monkeypatch)
        edited = first[:100] + prompt(40, seed=5)
        ask = driver.submit(edited, 12, slot=2, agent="a")
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 100
    predictions = Predictions(folder)
    assert drafts
    for known, drafted in drafts:
        assert predictions.draft(known, len(drafted), missing=99) == drafted


def test_its_bytes_are_counted_and_go_with_the_slot(driver: Driver) -> None:
    driver.answer(prompt(90, seed=7), 30, slot=1)
    slot_kv = driver.engine.loaded.loop.slot_kv
    context = slot_kv.slots[1]
    assert isinstance(context.companion, MTPContext)
    assert context.companion_bytes == context.companion.n_bytes > 0
    assert slot_kv.bytes_per_token > driver.engine.loaded.loop.batch.proposer.model.bytes_per_token
    driver.engine.run_slot_command(EraseSlot(1)).result(timeout=WAIT_S)
    assert context.companion is None


def test_a_broken_head_fails_no_request(model_of: ModelOf, tmp_path: Path) -> None:
    with running(drafting(with_head(model_of, "tiny")), tmp_path) as driver:
        draft_freely(driver)
        tokens = prompt(30, seed=2)
        batch = driver.engine.loaded.loop.batch
        expected = driver.cold(tokens, 24)
        batch.proposer.model._head.layers[0].self_attn = None
        assert driver.cold(tokens, 24) == expected
        assert batch.proposer.model.is_broken
        assert driver.engine.snapshot().draft_model is None
        assert driver.cold(tokens, 24) == expected


def test_without_speculation_no_head_is_loaded(model_of: ModelOf, tmp_path: Path) -> None:
    preset = replace(drafting(with_head(model_of, "tiny")), speculation=Speculation.OFF)
    with running(preset, tmp_path) as driver:
        assert not driver.engine.loaded.loop.batch.proposer.is_active


def test_the_head_of_the_demo_model_saves_passes(tmp_path: Path) -> None:
    """On its own conversations, which repeat little that could be copied."""
    with running(drafting(Path("demo")), tmp_path) as driver:
        draft_freely(driver)
        tokenizer = driver.engine.tokenizer
        before = driver.engine.snapshot().counters
        n_tokens = 0
        for text in CONVERSATIONS:
            tokens = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True
            )
            eos = frozenset(tokenizer.eos_token_ids)
            ask = driver.submit(tuple(tokens), 80, eos=eos, use_cache=False)
            n_tokens += driver.finish(ask).timings.n_generated
        after = driver.engine.snapshot().counters
        drafted = after.n_model_drafted_tokens - before.n_model_drafted_tokens
        assert drafted > 0
        assert after.n_decode_calls - before.n_decode_calls <= 0.6 * n_tokens


CONVERSATIONS = [
    "Hello! Who are you?",
    "What can you do?",
    "Tell me about yourself.",
    "Count from 1 to 10.",
    "How are you today?",
    "Name three colors.",
    "The secret word is lantern. Please remember it.",
    "Thank you very much!",
    "What is 3 plus 4?",
]


PUBLISHED = ["qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite"]


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_heads_of_other_types_are_loaded_and_predict(tmp_path: Path, model_type: str) -> None:
    config = config_of(model_type)
    source = write(tmp_path / "model", config | {"model_type": model_type})
    folder = add_head(source, tmp_path / "head")
    drafted = Predictions(folder).draft([3, 1, 4, 1, 5, 9, 2, 6], 4)
    assert len(drafted) == 4


def test_a_published_head_is_converted_as_its_model_is(tmp_path: Path) -> None:
    """Experts one by one, norms less one, convolutions in another order."""
    source = write(tmp_path / "model", HYBRID)
    converted = add_head(source, tmp_path / "converted")
    raw: dict[str, mx.array] = {}
    for name, tensor in {
        **tensors(source / "model.safetensors"),
        **tensors(converted / FILE),
    }.items():
        if "switch_mlp" in name:
            base, kind = name.split("switch_mlp.")
            raw |= {f"{base}experts.{i}.{kind}": one for i, one in enumerate(tensor)}
        elif "conv1d" in name:
            raw[name] = tensor.moveaxis(1, 2)
        else:
            is_norm = tensor.ndim == 1 and "norm" in name and "linear_attn" not in name
            raw[name] = tensor - 1 if is_norm else tensor
    published = write(tmp_path / "published", HYBRID)
    mx.save_safetensors(str(published / "model.safetensors"), raw)
    found = [dict(tree_flatten(load(folder)[1].parameters())) for folder in (converted, published)]
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        assert mx.allclose(array, found[1][name], atol=1e-6).item(), name


def tensors(file: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(file))
    return dict(loaded)


def test_a_quantized_head_is_loaded_as_it_is(tmp_path: Path, model_of: ModelOf) -> None:
    folder = add_head(model_of("tiny"), tmp_path / "model")
    exact = load(folder)[1]
    packed = {}
    for name, tensor in tensors(folder / FILE).items():
        if tensor.ndim == 2:
            parts = mx.quantize(tensor, group_size=32, bits=8)
            ends = ("weight", "scales", "biases")
            packed |= {name.removesuffix("weight") + e: p for e, p in zip(ends, parts, strict=True)}
        else:
            packed[name] = tensor
    mx.save_safetensors(str(folder / FILE), packed, CONVERTED)
    head = load(folder)[1]
    assert isinstance(head.projection, nn.QuantizedLinear)
    features = mx.random.normal((1, 5, 2 * head.norm.weight.shape[0]))
    expected = exact(features, make_prompt_cache(exact))
    got = head(features, make_prompt_cache(head))
    assert mx.allclose(got, expected, atol=0.1 * mx.abs(expected).max().item()).item()


SPOILED = [
    {"mtp.fc.weight": mx.zeros((3, 3))},
    {"mtp.layers.0.self_attn.q_proj.weight": mx.zeros((3, 3))},
    {"mtp.embed_tokens.weight": mx.zeros((3, 3))},
]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_head_that_does_not_fit_is_left_out_or_refused_where_it_was_named(
    tmp_path: Path, model_of: ModelOf, caplog: pytest.LogCaptureFixture, spoil: dict[str, mx.array]
) -> None:
    folder = add_head(model_of("tiny"), tmp_path / "model")
    mx.save_safetensors(str(folder / FILE), random_head(folder, 5) | spoil, CONVERTED)
    spec = ModelSpec(id=str(folder))
    target = loader.load(spec, KVSpec())
    assert draft_loading.load_mtp(spec, target) is None
    assert "is not used" in caplog.text
    with pytest.raises(SetupError, match=r"model\.mtp: the MTP head of .* does not fit"):
        draft_loading.load_mtp(replace(spec, mtp=str(folder)), target)


def test_a_converted_model_takes_the_head_of_the_published_one(
    tmp_path: Path, model_of: ModelOf
) -> None:
    """In 4 bits, as the model is."""
    published = add_head(model_of("tiny"), tmp_path / "published")
    exact = load(published)[1]
    converted = tmp_path / "converted"
    convert(str(model_of("tiny")), str(converted), quantize=True, q_bits=4, q_group_size=32)
    spec = ModelSpec(id=str(converted))
    target = loader.load(spec, KVSpec())
    assert draft_loading.load_mtp(spec, target) is None
    head = draft_loading.load_mtp(replace(spec, mtp=str(published)), target)
    assert head is not None
    assert head.layers[0].mlp.up_proj.bits == head.projection.bits == 4
    weight = head.projection
    unpacked = mx.dequantize(weight.weight, weight.scales, weight.biases, 32, 4)
    assert mx.allclose(unpacked, exact.projection.weight, atol=0.1).item()
    other = replace(spec, mtp=str(model_of("tiny")))
    with pytest.raises(SetupError, match=r"model\.mtp: .* has no MTP head; name the checkpoint"):
        draft_loading.load_mtp(other, target)
    with pytest.raises(SetupError, match=r"model\.mtp: there is no folder"):
        draft_loading.load_mtp(replace(spec, mtp=str(tmp_path / "none")), target)
    preset = replace(drafting(converted), model=replace(spec, mtp=str(published)))
    with running(preset, tmp_path / "home") as driver:
        draft_freely(driver)
        tokens = prompt(50, seed=1)
        said = driver.cold(tokens, 30)
        assert driver.engine.snapshot().counters.n_model_drafted_tokens > 0
    with running(drafting(converted), tmp_path / "home") as driver:
        assert driver.cold(tokens, 30) == said


def test_of_a_published_model_only_the_files_of_its_head_are_fetched(
    tmp_path: Path, model_of: ModelOf
) -> None:
    folder = add_head(model_of("tiny"), tmp_path / "model")
    body = tensors(folder / "model.safetensors")
    head = tensors(folder / FILE)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, part in zip(names, (body, head), strict=True):
        mx.save_safetensors(str(folder / name), part, CONVERTED)
    (folder / "model.safetensors").unlink()
    (folder / FILE).unlink()
    places = dict.fromkeys(body, names[0]) | dict.fromkeys(head, names[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    command = [sys.executable, "-m", "tests.features.drafts.locate_head", MODEL]
    with serving(files_of(folder)) as hub:
        hub.go_on.set()
        env = {**os.environ, **hub.env(tmp_path / "hub")}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        found = [Path(line) for line in run.stdout.splitlines()]
        assert len(found) == 2 and found[0] == found[1], run.stderr
        assert (found[0] / "tokenizer.json").exists()
        assert (found[0] / names[1]).exists() and not (found[0] / names[0]).exists()
        assert hub.fetched.count(names[1]) == 1 and names[0] not in hub.fetched
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    assert load_head(model, found[0]) is not None


def planned(folder: Path, **settings: Any) -> Candidate:
    """Candidate of the model in a folder, or of its config.json alone."""
    files = read_config(folder)
    return of_files(Preset(model=ModelSpec(id=str(folder)), **settings), files)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_head_that_is_loaded(model_of: ModelOf, kind: str) -> None:
    folder = with_head(model_of, kind)
    _, head = load(folder)
    n_bytes = sum(array.nbytes for _, array in tree_flatten(head.parameters()))
    candidate = planned(folder)
    without = planned(folder, speculation=Speculation.OFF)
    assert candidate.head.n_bytes(4) == n_bytes
    assert candidate.weights == without.weights.plus(candidate.head)
    assert without.weights == measured(model_of(kind))
    layer = candidate.geometry().layers[-1]
    assert candidate.load().draft.layers == (layer,)
    assert not without.load().draft.layers


def test_a_head_that_is_not_here_is_counted_by_its_config(
    model_of: ModelOf, tmp_path: Path
) -> None:
    folder = with_head(model_of, "tiny-mla")
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, Weights] = {}
    for name, more in (
        ("published", {"num_nextn_predict_layers": 1}),
        ("converted", {"num_nextn_predict_layers": 1, "quantization": {"group_size": 32}}),
        ("without", {}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
        found[name] = planned(tmp_path / name).head
    assert found["published"].n_half == pytest.approx(planned(folder).head.n_single, rel=0.05)
    assert found["converted"] == found["without"] == Weights()


def test_a_file_that_is_no_weights_costs_the_head_alone(model_of: ModelOf, tmp_path: Path) -> None:
    folder = add_head(model_of("tiny-hybrid"), tmp_path / "model")
    (folder / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07" + bytes(4092))
    model, _ = load(folder)
    # A copy of the weights that Git LFS left as a pointer is not the model's.
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert load_head(model, folder) is not None
    assert read_config(folder).head.n_single > 0
    (folder / "mtp-more.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ValueError, match="mtp-more"):
        load_head(model, folder)


def test_models_that_are_more_than_their_parts_have_no_head() -> None:
    assert parts_of(build("gemma2")) is None
    assert parts_of(build("llama")) is not None


MOVES = st.tuples(st.sampled_from(["add", "hold", "rewind"]), st.integers(0, 40))


@given(moves=st.lists(MOVES))
def test_pairs_are_those_of_the_tokens_that_are_left(moves: list[tuple[str, int]]) -> None:
    """Token i is i, and so is its state."""
    pairs = MTPContext(CacheFactory(NoLayers(), KVSpec()), 5)
    held: list[int] = []
    n_tokens = 6
    for move, n in moves:
        if move == "add" and n:
            start = pairs.end
            pairs.add(mx.arange(start, start + n)[:, None], range(start + 1, start + n + 1))
            n_tokens = start + n + 1
        elif move == "hold":
            held += [token for _, token in pairs.behind]
            pairs.note_held()
        elif move == "rewind":
            n_tokens = max(1, n_tokens - n)
            pairs.rewind(n_tokens)
            held = [token for token in held if token < n_tokens]
        waiting = [(int(state.item().real), token) for state, token in pairs.behind]
        assert waiting == [(i, i + 1) for i in range(pairs.end - len(waiting), pairs.end)]
        assert pairs.n_held == len(held)
        assert pairs.start <= pairs.end
        assert pairs.end in (pairs.start, n_tokens - 1)
        if pairs.open is not None:
            assert int(pairs.open.item().real) == pairs.end < n_tokens


class NoLayers:
    """A head without KV."""

    layers = ()
