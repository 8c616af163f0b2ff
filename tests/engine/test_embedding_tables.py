"""Rows of embeddings and positions: no index beyond them reaches a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.utils import _get_classes
from msgspec.structs import replace

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec, Preset, ServiceKind, SlotSpec, Speculation
from mlxstack.engine.embedding_engine import EmbeddingEngine
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.embedding_tables import EmbeddingTables, embedding_tables
from mlxstack.models.model_files import n_trained_in
from tests import models
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, preset_of, prompt, running
from tests.matrix.builder import build

pytestmark = pytest.mark.mlx
GPT2 = {
    "model_type": "gpt2", "n_ctx": 64, "n_positions": 64, "n_embd": 64, "n_head": 2, "n_layer": 2,
    "layer_norm_epsilon": 1e-5, "vocab_size": models.VOCAB,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama", EmbeddingTables(160)), ("gpt2", EmbeddingTables(160, 512)),
        ("gpt_bigcode", EmbeddingTables(160, 512)), ("gemma3n", EmbeddingTables(160)),
        ("mamba", EmbeddingTables(160)), ("longcat_flash_ngram", EmbeddingTables(160)),
    ],
)  # fmt: skip
def test_tables_are_found_by_what_they_get(name: str, found: EmbeddingTables) -> None:
    model = build(name)
    classes = [type(module) for _, module in model.named_modules()]
    assert embedding_tables(model) == found
    assert [type(module) for _, module in model.named_modules()] == classes


def test_a_table_that_is_quantized_is_found() -> None:
    model_class, args_class = _get_classes(GPT2)
    model = model_class(args_class.from_dict(GPT2))
    nn.quantize(model, group_size=32)
    assert embedding_tables(model) == EmbeddingTables(models.VOCAB, 64)


class Offset(nn.Module):  # type: ignore[misc]
    """A model whose first position has the row 2, as in OPT, and a head of its own size."""

    def __init__(self, n_head: int = 20) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Embedding(34, 8)
        self.head = nn.Linear(8, n_head)
        self.layers: list[Any] = []

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        """Logits of tokens (rows, tokens)."""
        positions = mx.arange(tokens.shape[1]) + 2
        return self.head(self.tokens(tokens) + self.positions(positions))


def test_positions_that_do_not_begin_with_the_first_row_are_fewer() -> None:
    assert embedding_tables(Offset()) == EmbeddingTables(20, 32)


def test_a_head_that_samples_tokens_without_a_row_is_refused() -> None:
    with pytest.raises(SetupError, match="24 rows in the head and 20 in the embedding"):
        embedding_tables(Offset(24))
    assert embedding_tables(Offset(16)).n_rows == 16


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return models.write(tmp_path / "gpt2", GPT2)


def test_a_slot_is_no_longer_than_the_learned_positions(gpt2: Path, tmp_path: Path) -> None:
    assert n_trained_in(GPT2) == 64
    preset = preset_of(gpt2, slots=SlotSpec(count=1, n_ctx=65))
    refusal = r"n_ctx is 65, but .* has 64 positions"
    with pytest.raises(SetupError, match=refusal), running(preset, tmp_path / "home"):
        pass
    with running(preset_of(gpt2, slots=SlotSpec(count=1, n_ctx=64)), tmp_path / "home") as driver:
        assert len(driver.answer(prompt(60, seed=1), 40)) == 4


def test_an_embedder_is_no_longer_than_its_positions(gpt2: Path) -> None:
    slots = SlotSpec(count=1, n_ctx=65)
    spec = Preset(model=ModelSpec(id=str(gpt2)), kind=ServiceKind.EMBEDDING, slots=slots)
    engine = EmbeddingEngine(spec)
    with pytest.raises(SetupError, match="has 64 positions"):
        engine.start().result(WAIT_S)
    engine.stop(0).result(WAIT_S)


def test_a_draft_model_gets_no_token_that_it_lacks(model_of: ModelOf, tmp_path: Path) -> None:
    """Families add tokens: the target has 24 more rows than its draft."""
    target = models.write(tmp_path / "target", models.LLAMA | {"vocab_size": models.VOCAB + 24})
    preset = preset_of(target)
    spec = ModelSpec(id=str(target), draft=str(model_of("tiny")))
    tokens = (*prompt(40, seed=2), *range(models.VOCAB, models.VOCAB + 24))
    with running(preset, tmp_path / "plain") as driver:
        plain = driver.answer(tokens, 24)
    drafting = replace(preset, model=spec, speculation=Speculation.AUTO)
    with running(drafting, tmp_path / "drafting") as driver:
        assert driver.answer(tokens, 24) == plain
        draft = driver.engine.loaded.loop.batch.proposer.model
        assert draft is not None
        assert max(draft._text(list(tokens))) < models.VOCAB


def changed(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intermediate_size": ...}, "config.json of type 'llama' lacks 'intermediate_size'"),
        ({"rope_scaling": {"type": "linear"}}, "config.json of type 'llama' lacks 'factor'"),
        ({"rope_scaling": {"type": "none"}}, "Unsupported RoPE type none"),
    ],
)
def test_a_config_that_lacks_a_key_is_refused_with_it(
    model_of: ModelOf, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(model_of("tiny"), tmp_path / "model")
    with pytest.raises(SetupError) as refused:
        loader.load(ModelSpec(str(changed(folder, **changes))), KVSpec())
    assert said in refused.value.message and "__init__" not in refused.value.message


def test_tensors_without_a_place_are_counted(model_of: ModelOf, tmp_path: Path) -> None:
    folder = shutil.copytree(model_of("tiny"), tmp_path / "model")
    stray = {f"model.layers.{i}.packed": mx.zeros((1,)) for i in range(400)}
    mx.save_safetensors(str(folder / "model-more.safetensors"), stray)
    with pytest.raises(SetupError, match="400 tensors of its weights have no place") as refused:
        loader.load(ModelSpec(str(folder)), KVSpec())
    assert len(refused.value.message) < 800
    (folder / "model-more.safetensors").unlink()
    weights: Any = mx.load(str(folder / "model.safetensors"))
    few = {name: array for name, array in weights.items() if "q_proj" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), few)
    with pytest.raises(SetupError, match="tensors of its weights are missing"):
        loader.load(ModelSpec(str(folder)), KVSpec())


def test_an_output_head_of_its_own_is_kept_where_config_says_nothing(tmp_path: Path) -> None:
    own = models.LLAMA | {"tie_word_embeddings": False}
    folder = models.write(tmp_path / "model", own)
    tokens = mx.array([prompt(20, seed=1)])
    before = loader.load(ModelSpec(str(folder)), KVSpec()).model(tokens)
    for absent in (..., None):
        changed(folder, tie_word_embeddings=absent)
        assert mx.array_equal(loader.load(ModelSpec(str(folder)), KVSpec()).model(tokens), before)
    tied = models.write(tmp_path / "tied", models.LLAMA)
    model = loader.load(ModelSpec(str(changed(tied, tie_word_embeddings=...))), KVSpec()).model
    assert "lm_head" not in model


@pytest.mark.parametrize("part", ["mlp.up_proj", "embed_tokens", "input_layernorm"])
def test_numbers_that_mlx_reads_as_others_are_refused(tmp_path: Path, part: str) -> None:
    """MLX gives 8-bit floats of safetensors as integers, as these are."""
    folder = models.write(tmp_path / "model", models.LLAMA)
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights = {k: v.astype(mx.uint8) if part in k else v + 0 for k, v in loaded.items()}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(SetupError, match=f"{part} are numbers of a type .* without scales"):
        loader.load(ModelSpec(str(folder)), KVSpec())


def test_the_identity_does_not_hang_on_weights_that_are_not_read(
    model_of: ModelOf, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_of("tiny"), tmp_path / "model")
    before = loader.weights_digest(folder)
    (folder / "consolidated.safetensors").write_bytes(b"other")
    assert loader.weights_digest(folder) == before
    (folder / "mtp.safetensors").write_bytes(b"other")
    assert loader.weights_digest(folder) != before
