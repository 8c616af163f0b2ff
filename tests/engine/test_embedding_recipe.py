"""Vectors of embedding models by the recipe in their folder, beside an oracle of numpy."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ModelSpec, Preset, ServiceKind, SlotSpec
from mlxstack.engine.embedding_engine import EmbeddingEngine
from mlxstack.engine.embedding_pooling import Pooler
from mlxstack.models.embedding_recipe import EmbeddingRecipe, PoolingMode, embedding_recipe
from mlxstack.models.folder_check import check_folder
from tests import models
from tests.engine.harness import WAIT_S, prompt

pytestmark = pytest.mark.mlx
WIDTH = int(models.LLAMA["hidden_size"])
TEXTS = tuple(prompt(n, seed=n) for n in (1, 7, 30, 30))
ST = "sentence_transformers.models"
MODES: dict[str, Any] = {
    "cls_token": lambda h: h[0],
    "max_tokens": lambda h: h.max(axis=0),
    "mean_tokens": lambda h: h.mean(axis=0),
    "mean_sqrt_len_tokens": lambda h: h.sum(axis=0) / math.sqrt(len(h)),
    "weightedmean_tokens": lambda h: np.average(h, axis=0, weights=np.arange(1, len(h) + 1)),
    "lasttoken": lambda h: h[-1],
}
"""Poolings of sentence-transformers, in the order of their concatenation."""


def erf(x: Any) -> Any:
    return np.vectorize(math.erf)(x)


ACTIVATIONS: dict[str, Any] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
    "torch.nn.modules.activation.GELU": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "torch.nn.modules.activation.SiLU": lambda x: x / (1 + np.exp(-x)),
    "torch.nn.modules.activation.Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return models.write(tmp_path / "model", models.LLAMA)


def write(folder: Path, *kinds: str, **pooling: Any) -> None:
    """modules.json of Transformer, Pooling and other modules, as the library saves it."""
    modules = ["Transformer", "Pooling", *kinds]
    listed = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"{ST}.{kind}"}
        for at, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed[::-1]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": WIDTH, **pooling})
    )


def dense(folder: Path, n_in: int, n_out: int, activation: str, *, has_bias: bool) -> Any:
    """A random dense layer in its folder; the function that it is."""
    folder.mkdir()
    weight = np.random.default_rng(1).normal(size=(n_out, n_in)).astype(np.float32)
    bias = np.random.default_rng(2).normal(size=n_out).astype(np.float32) * has_bias
    tensors = {"linear.weight": mx.array(weight)}
    tensors |= {"linear.bias": mx.array(bias)} if has_bias else {}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = {"in_features": n_in, "out_features": n_out, "bias": has_bias}
    (folder / "config.json").write_text(json.dumps({**config, "activation_function": activation}))
    return lambda x: ACTIVATIONS[activation](weight @ x + bias)


@contextmanager
def started(folder: Path) -> Iterator[EmbeddingEngine]:
    preset = Preset(
        model=ModelSpec(id=str(folder)),
        kind=ServiceKind.EMBEDDING,
        slots=SlotSpec(count=1, n_ctx=1024),
    )
    engine = EmbeddingEngine(preset)
    try:
        engine.start().result(WAIT_S)
        yield engine
    finally:
        engine.stop(0).result(WAIT_S)


def states(folder: Path, text: tuple[int, ...]) -> Any:
    """Hidden states of a text by mlx-lm."""
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    return np.array(model.model(mx.array([text]))[0])


def check(folder: Path, oracle: Any) -> None:
    """Compare the vectors of all texts, embedded together, with the oracle's."""
    with started(folder) as engine:
        vectors = engine.embed(TEXTS).result(WAIT_S)
    for text, vector in zip(TEXTS, vectors, strict=True):
        expected = unit(oracle(states(folder, text)))
        assert np.allclose(np.frombuffer(vector, np.float32), expected, atol=1e-5), len(text)


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_is_that_of_the_library(folder: Path, mode: str) -> None:
    write(folder, **{f"pooling_mode_{name}": name == mode for name in MODES})
    check(folder, MODES[mode])


def test_several_poolings_are_concatenated(folder: Path) -> None:
    write(folder, **{f"pooling_mode_{name}": True for name in MODES})
    check(folder, lambda h: np.concatenate([pool(h) for pool in MODES.values()]))


@pytest.mark.parametrize(("named", "mode"), [("mean", "mean_tokens"), (["lasttoken"], "lasttoken")])
def test_a_pooling_by_its_name_is_taken(folder: Path, named: Any, mode: str) -> None:
    write(folder, pooling_mode=named)
    check(folder, MODES[mode])


def test_a_pooling_without_a_list_of_modules_is_taken(folder: Path) -> None:
    write(folder, pooling_mode_mean_tokens=True)
    (folder / "modules.json").unlink()
    check(folder, MODES["mean_tokens"])


def test_without_a_recipe_it_is_the_last_token(folder: Path) -> None:
    check(folder, MODES["lasttoken"])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_layers_are_computed(folder: Path, activation: str) -> None:
    write(folder, "Dense", "Dense", "Normalize", pooling_mode_mean_tokens=True)
    first = dense(folder / "2_Dense", WIDTH, 48, activation, has_bias=True)
    second = dense(folder / "3_Dense", 48, 20, "torch.nn.modules.linear.Identity", has_bias=False)
    check(folder, lambda h: second(first(h.mean(axis=0))))


def test_a_normalization_before_a_dense_layer_is_computed(folder: Path) -> None:
    write(folder, "Normalize", "Dense", pooling_mode_mean_tokens=True)
    layer = dense(folder / "3_Dense", WIDTH, 20, "torch.nn.modules.activation.Tanh", has_bias=True)
    check(folder, lambda h: layer(unit(h.mean(axis=0))))


def config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": True}, {"is_causal": False}, {"use_bidirectional": "all"},
        {"text_config": {"use_bidirectional_attention": True}},
        {"architectures": ["LlamaBidirectionalModel"]}, {"architectures": ["Qwen2BiModel"]},
        {"auto_map": {"AutoModel": "modeling_own.LlamaBidirectionalModel"}},
    ],
)  # fmt: skip
def test_attention_in_both_directions_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    config(folder, **changes)
    refusal = r"cannot embed: .* both directions .*bidirectional"
    with pytest.raises(SetupError, match=refusal), started(folder):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": False}, {"is_causal": True}, {"is_causal": None},
        {"use_bidirectional_attention": "vision"}, {"architectures": ["Qwen3ForCausalLM"]},
    ],
)  # fmt: skip
def test_causal_attention_is_taken(folder: Path, changes: dict[str, Any]) -> None:
    config(folder, **changes)
    assert embedding_recipe(folder) == EmbeddingRecipe()


@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        ((), {}, "names no pooling mode"),
        ((), {"pooling_mode_attention": True}, "pooling_mode_attention is not computed"),
        ((), {"pooling_mode": "attention"}, "attention is not computed"),
        ((), {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        (("LSTM",), {"pooling_mode_mean_tokens": True}, "names the module LSTM"),
        (("Pooling",), {"pooling_mode_mean_tokens": True}, "names the module Pooling"),
    ],
)
def test_a_recipe_that_is_not_computed_is_refused(
    folder: Path, kinds: tuple[str, ...], pooling: dict[str, Any], reason: str
) -> None:
    write(folder, *kinds, **pooling)
    with pytest.raises(SetupError, match=reason):
        embedding_recipe(folder)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([{"idx": 0, "type": "custom_st.Transformer", "path": ""}], "is code of the folder"),
        ([{"idx": 0, "type": f"{ST}.Transformer", "path": "0_Transformer"}], "Transformer in 0_T"),
        ([{"idx": 0, "type": f"{ST}.Transformer", "path": ""}], "names no pooling"),
        ([{"idx": 1, "type": f"{ST}.Pooling", "path": "../other"}], "outside of the model"),
        ([{"idx": "x", "type": f"{ST}.Pooling"}], "not what it should be"),
        ({"a": 1}, "not what it should be"),
    ],
)
def test_odd_modules_are_refused(folder: Path, modules: Any, reason: str) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SetupError, match=reason):
        embedding_recipe(folder)


def test_a_dense_layer_that_cannot_be_computed_is_refused(folder: Path) -> None:
    write(folder, "Dense", pooling_mode_mean_tokens=True)
    layer = folder / "2_Dense"
    dense(layer, WIDTH + 1, 20, "torch.nn.modules.linear.Identity", has_bias=True)
    with pytest.raises(SetupError, match=f"does not fit vectors of {WIDTH}"), started(folder):
        pass
    (layer / "config.json").write_text('{"activation_function": "torch.nn.Mish"}')
    with pytest.raises(SetupError, match="activation Mish"):
        embedding_recipe(folder)
    (layer / "config.json").write_text("{}")
    (layer / "model.safetensors").rename(layer / "pytorch_model.bin")
    with pytest.raises(SetupError, match=r"holds no model\.safetensors"):
        embedding_recipe(folder)
    (layer / "config.json").unlink()
    with pytest.raises(SetupError, match="2_Dense"):
        embedding_recipe(folder)


def test_the_default_prompt_is_told(folder: Path) -> None:
    file = folder / "config_sentence_transformers.json"
    prompts = {"query": "Find: ", "document": ""}
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    assert embedding_recipe(folder).prompt == ""
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    with started(folder) as engine:
        assert engine._loaded.result().text_prompt == "Find: "
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "none"}))
    with pytest.raises(SetupError, match="no prompt of the name 'none'"):
        embedding_recipe(folder)


@pytest.mark.parametrize("n", [4, 0, None, True, "4", 2**40])
def test_the_longest_text_and_the_end_are_told(folder: Path, n: Any) -> None:
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": n}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_eos_token": n == 4}))
    with started(folder) as engine:
        facts = engine._loaded.result()
        assert facts.max_text_tokens == (4 if n == 4 else 0)
        assert facts.text_end == (engine.tokenizer.eos_token_id if n == 4 else None)


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"", b"<html>"]
)
def test_a_damaged_dense_layer_is_named(folder: Path, content: bytes) -> None:
    write(folder, "Dense", pooling_mode_mean_tokens=True)
    dense(folder / "2_Dense", WIDTH, 20, "torch.nn.modules.linear.Identity", has_bias=False)
    (folder / "2_Dense" / "model.safetensors").write_bytes(content)
    with pytest.raises(SetupError, match=r"2_Dense/model\.safetensors"):
        embedding_recipe(folder)


def test_texts_in_lower_case_are_refused(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(SetupError, match="do_lower_case"):
        embedding_recipe(folder)


def test_padding_does_not_change_a_text_whose_rope_depends_on_the_length(tmp_path: Path) -> None:
    dynamic = {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    folder = models.write(tmp_path / "model", models.LLAMA | dynamic)
    check(folder, MODES["lasttoken"])


def test_nan_of_padding_stays_out() -> None:
    states = mx.array([[[1.0, 2.0], [math.nan, math.nan]]])
    for mode in PoolingMode:
        vectors = Pooler(EmbeddingRecipe((mode,)), 2).vectors(states, [1])
        assert np.allclose(np.array(vectors), unit(np.array([1.0, 2.0])))


def test_a_pipe_in_a_folder_of_a_module_is_refused(folder: Path) -> None:
    write(folder, pooling_mode_mean_tokens=True)
    (folder / "1_Pooling" / "config.json").unlink()
    os.mkfifo(folder / "1_Pooling" / "config.json")
    with pytest.raises(SetupError, match="named pipe"):
        check_folder(folder)
    with pytest.raises(SetupError, match="named pipe"):
        embedding_recipe(folder)
