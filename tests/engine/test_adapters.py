"""A LoRA adapter, as mlx-lm writes it, changes the answers, and what their KV depends on."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec, Preset
from mlxstack.engine.loading import loader
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running


def adapter(folder: Path, model: Path, scale: float = 4.0) -> Path:
    """A random adapter of rank 4 for all layers of this model."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model, save_config

    folder.mkdir()
    tuned, _ = load_model(model)
    tuned.freeze()
    shape = {"rank": 4, "scale": scale, "dropout": 0.0}
    linear_to_lora_layers(tuned, 4, shape)
    mx.random.seed(7)
    matrices = tree_map(lambda a: 0.1 * mx.random.normal(a.shape), tuned.trainable_parameters())
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(matrices)))
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": shape}
    save_config(config, folder / "adapter_config.json")
    return folder


def identity(model: Path, lora: Path | None = None) -> str:
    spec = ModelSpec(str(model), adapter=str(lora) if lora else None)
    return loader.load(spec, KVSpec()).facts.identity.key()


def test_an_adapter_changes_the_answers_and_shares_no_kv(model_of: ModelOf, tmp_path: Path) -> None:
    base = preset_of(model_of("tiny"))
    lora = adapter(tmp_path / "lora", model_of("tiny"))
    tuned = Preset(model=ModelSpec(base.model.id, adapter=str(lora)), slots=base.slots)
    mine = prompt(200, seed=1)
    with running(base, tmp_path) as driver:
        plain = driver.answer(mine)
    with running(tuned, tmp_path) as driver:
        ask = driver.submit(mine)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 0
        answer = tuple(driver.tokens(ask))
        assert list(answer) != plain
        follow_up = mine + answer + prompt(20, seed=2)
        cold = driver.cold(follow_up, slot=1)
        assert driver.answer(follow_up) == cold
    with running(tuned, tmp_path) as driver:
        assert driver.answer(follow_up) == cold


def test_the_scale_of_an_adapter_is_part_of_the_identity(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of("tiny")
    one = adapter(tmp_path / "1", model, 4.0)
    two = adapter(tmp_path / "2", model, 2.0)
    assert len({identity(model), identity(model, one), identity(model, two)}) == 3
    assert identity(model, one) == identity(model, one)


def test_an_adapter_that_does_not_fit_is_refused_in_words(
    model_of: ModelOf, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "lora", model_of("tiny"))
    with pytest.raises(SetupError, match=r"model\.adapter: .* is no adapter for"):
        identity(model_of("tiny-swa"), lora)
    (lora / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora"}))
    with pytest.raises(SetupError, match="num_layers"):
        identity(model_of("tiny"), lora)
    (lora / "adapters.safetensors").unlink()
    with pytest.raises(SetupError, match=r"model\.adapter"):
        identity(model_of("tiny"), lora)
