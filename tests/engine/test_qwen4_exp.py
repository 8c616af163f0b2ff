"""`qwen4_exp` of mlx-vlm against transformers: in one pass, cut anywhere, and after every reuse.

`make logits` writes the fixture anew.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlxstack.core.engine_events import KVSource
from mlxstack.core.preset import KVSpec, ModelSpec, SlotSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.decode.copy_check import why_not_copied
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.mlx_vlm_models import is_installed
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.models.model_files import read_config
from mlxstack.policy.memory.capacity import Weights
from mlxstack.policy.pass_layout import RowMode
from tests.engine import qwen4_exp_folder as folders
from tests.engine.harness import Driver, preset_of, running
from tests.matrix.checks import decode, through_bytes
from tests.repetition import in_soak

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(not is_installed(), reason="it needs the extra more-models (make models)"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FIXTURE: Any = mx.load(str(Path(__file__).with_name("qwen4_exp.safetensors")))
TOLERANCE = 1e-4
"""Of logits whose standard deviation is 0.6."""
WRONG = 0.05
"""Logits without a part of the model are at least so far off."""
N_MORE = 8
"""Tokens after a cut, fed again after each kind of reuse."""
PROMPT = folders.prompts()[0]
EVERY_POSITION = [("one", 1), ("two", 7), ("ties", 7), *in_soak(("two", 1), ("ties", 1))]
"""Models, and steps from cut to cut; `pytest --soak` takes all for each."""
every_position = pytest.mark.parametrize(
    ("tried", "step"), EVERY_POSITION, indirect=["tried"], scope="module"
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Tried:
    """A model of the fixture, and what transformers computes of it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self.model = loader.load(ModelSpec(id=str(folder)), KVSpec()).model
        self.runner = ModelRunner(self.model)
        self.factory = CacheFactory(self.model, KVSpec())
        self.expected = FIXTURE[f"{kind}.logits"]
        self.answers: list[list[int]] = FIXTURE[f"{kind}.answers"].tolist()

    def feed(self, context: SlotContext, tokens: Sequence[int]) -> mx.array:
        """Kept logits (tokens, part of the vocabulary)."""
        logits = self.runner.forward(mx.array([tokens]), context.caches)[0]
        context.extend(tokens)
        context.evaluate()
        return logits[:, :: folders.EVERY]

    def check(self, context: SlotContext, end: int, how: str) -> None:
        """Feed the prompt up to `end`, and compare."""
        start = len(context)
        logits = self.feed(context, PROMPT[start:end])
        largest = mx.abs(logits - self.expected[start:end]).max().item()
        assert largest < TOLERANCE, f"{how} at {start}: {largest:.2g}"


@pytest.fixture(scope="module", params=folders.CONFIGS)
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def load(kind: str, folder: Path) -> Tried:
    folders.write(folder, kind)
    for part in TOKENIZER:
        shutil.copy(MODEL_DIR / part, folder)
    return Tried(kind, folder)


def test_logits_of_all_positions_are_those_of_transformers(tried: Tried) -> None:
    tried.check(SlotContext(tried.factory), len(PROMPT), "at once")


@pytest.mark.parametrize("part", ["sparse blocks", "n-grams", "short convolution"])
def test_without_a_part_of_the_model_logits_are_others(
    tried: Tried, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in tried.model.layers:
        if part == "sparse blocks" and not layer.is_linear:
            monkeypatch.setattr(layer.self_attn.indexer, "block_topk", len(PROMPT))
        if part == "n-grams" and "ple" in layer:
            table = layer.ple.ple_embedding
            monkeypatch.setattr(table, "layer_multipliers", table.layer_multipliers + 2)
        if part == "short convolution" and "ple" in layer:
            conv = layer.ple.conv1d
            monkeypatch.setattr(conv, "weight", mx.zeros_like(conv.weight))
    logits = tried.feed(SlotContext(tried.factory), PROMPT)
    distances = mx.abs(logits - tried.expected).max(axis=1)
    # At each of the last positions: blocks and windows were passed many times before.
    assert distances[len(PROMPT) // 2 :].min().item() > WRONG


@every_position
def test_a_prompt_cut_anywhere_has_the_same_logits(tried: Tried, step: int) -> None:
    for cut in range(1, len(PROMPT), step):
        context = SlotContext(tried.factory)
        tried.check(context, cut, f"before a cut at {cut}")
        tried.check(context, len(PROMPT), "after a cut")


@every_position
def test_hit_fork_and_restart_at_a_position_have_the_same_logits(tried: Tried, step: int) -> None:
    assert why_not_copied(tried.runner, tried.factory, folders.N_VOCAB) is None
    context = SlotContext(tried.factory)
    tried.check(context, 2, "at the start")
    for cut in range(2, len(PROMPT), step):
        end = min(cut + N_MORE, len(PROMPT))
        context.checkpoint()
        fork = context.new_empty()
        assert fork.fork_from(context, cut) == cut
        restored = through_bytes(context, cut // 2)
        tried.feed(context, PROMPT[cut - 2 : cut + N_MORE][::-1])
        assert context.rewind(cut) == cut
        tried.check(context, end, "after a hit")
        tried.check(fork, end, "after a fork")
        tried.check(restored, end, "after a restart")
        assert context.rewind(cut) == cut
        for position in range(cut, min(cut + step, len(PROMPT))):
            tried.check(context, position + 1, "token by token")


def test_four_rows_join_and_leave(tried: Tried) -> None:
    check = self_check(tried.model, tried.factory, folders.N_VOCAB)
    assert check.rows is RowMode.ATTENTION_BY_ROW
    prompts = folders.prompts()
    contexts = [SlotContext(tried.factory) for _ in prompts]
    for context, tokens in zip(contexts, prompts, strict=True):
        tried.feed(context, tokens[:-1])
    answers = decode(tried.model, contexts, prompts, check.rows, n_tokens=folders.N_ANSWERED)
    assert answers == tried.answers


@pytest.fixture
def slots() -> SlotSpec:
    return SlotSpec(count=4, n_ctx=1024)


def test_requests_at_once_get_the_answers_of_transformers(
    tried: Tried, slots: SlotSpec, tmp_path: Path
) -> None:
    with running(preset_of(tried.folder, slots=slots), tmp_path) as driver:
        asks = [driver.submit(tuple(tokens), folders.N_ANSWERED) for tokens in folders.prompts()]
        for ask in asks:
            driver.finish(ask)
        assert [driver.tokens(ask) for ask in asks] == tried.answers


def test_next_turn_fork_and_restart_of_an_engine_answer_as_transformers(
    tried: Tried, slots: SlotSpec, tmp_path: Path
) -> None:
    prompt = tuple(PROMPT)
    shared = 256
    preset = preset_of(tried.folder, slots=slots)

    def answer(driver: Driver, slot: int, source: KVSource, n_cached: int = shared) -> list[int]:
        ask = driver.submit(prompt, folders.N_ANSWERED, slot=slot)
        driver.finish(ask)
        seated = driver.seated(ask)
        assert (seated.source, seated.n_cached) == (source, n_cached)
        return driver.tokens(ask)

    with running(preset, tmp_path) as driver:
        # Another prompt with the same head.
        driver.answer(prompt[:shared] + prompt[:30], 4, slot=0, checkpoint_positions=(shared,))
        assert answer(driver, 1, KVSource.FORK) == tried.answers[0]
        driver.answer(prompt[:shared] + prompt[9:30], 4, slot=1)
        assert answer(driver, 1, KVSource.SLOT) == tried.answers[0]
        driver.catch_up()
    with running(preset, tmp_path) as driver:
        assert answer(driver, 2, KVSource.DISK, len(prompt) - 1) == tried.answers[0]


def test_the_planner_counts_the_bytes_by_which_sparse_layers_grow(tried: Tried) -> None:
    config = json.loads((tried.folder / "config.json").read_text())
    shape = shape_of_config(config | {"dtype": "bfloat16"})
    context = SlotContext(tried.factory)
    tried.feed(context, PROMPT[:8])
    n_before = _sparse_bytes(context)
    tried.feed(context, PROMPT[8:264])
    assert shape.widened.growth * 256 == _sparse_bytes(context) - n_before
    # In half precision all but the positions take half as much.
    position_bytes = 3 * 4 * len(shape.geometry.full_layers)
    assert 2 * shape.geometry.growth == shape.widened.growth + position_bytes


def test_a_table_on_disk_is_not_planned_in_memory(tried: Tried, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    shutil.copytree(tried.folder, stored)
    config = json.loads((stored / "config.json").read_text())
    config["text_config"]["ple_storage"] = {"manifest": "ple-store.json"}
    (stored / "config.json").write_text(json.dumps(config))
    whole, without = read_config(tried.folder), read_config(stored)
    tables = [
        layer.ple.ple_embedding.ngram_embedding for layer in tried.model.layers if "ple" in layer
    ]
    n_table = sum(a.size for table in tables for _, a in tree_flatten(table.parameters()))
    assert n_table
    assert whole.weights is not None
    assert without.weights is not None
    assert without.weights.plus(Weights(n_single=n_table)) == whole.weights
    shapes = [shape_of_config(files.config | {"dtype": "float32"}) for files in (whole, without)]
    assert shapes[0].geometry == shapes[1].geometry
    built = [shape.weights for shape in shapes]
    assert built[0] is not None
    assert built[1] is not None
    assert built[1].plus(Weights(n_single=n_table)) == built[0]


def _sparse_bytes(context: SlotContext) -> int:
    caches = [cache for cache in context.caches if isinstance(cache, KVCache)]
    arrays = tree_flatten([cache.state for cache in caches])
    return sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))
