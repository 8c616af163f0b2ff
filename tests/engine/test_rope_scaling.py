"""Scaled rotary embeddings: mlx-lm's, never silently ignored, and part of what KV depends on."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.core.preset import KVSpec, ModelSpec, Preset, RopeSpec, RopeType
from mlxstack.engine.loading import loader
from mlxstack.models.model_files import ModelFiles
from mlxstack.planner.candidate import of_files
from tests import models
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running

YARN = RopeSpec(RopeType.YARN, 4.0)
LINEAR = RopeSpec(RopeType.LINEAR, 2.0)


def written(folder: Path, model: Path, rope: RopeSpec) -> Path:
    """Copy of a model whose config.json has the scaling."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": rope.type,
        "factor": rope.factor,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("rope", [YARN, LINEAR])
def test_logits_are_those_of_a_config_that_has_it(
    model_of: ModelOf, tmp_path: Path, rope: RopeSpec
) -> None:
    tokens = mx.array([prompt(300, seed=1)])
    ours = loader.load(ModelSpec(str(model_of("tiny")), rope=rope), KVSpec())
    plain, _ = load_model(model_of("tiny"))
    theirs, _ = load_model(written(tmp_path / "scaled", model_of("tiny"), rope))
    assert mx.array_equal(ours.model(tokens), theirs(tokens))
    assert not mx.allclose(ours.model(tokens), plain(tokens))
    assert ours.facts.n_ctx_train == 8192 * rope.factor


GEMMA = {
    "model_type": "gemma",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": models.VOCAB,
    "max_position_embeddings": 8192,
}
"""A model whose code in mlx-lm reads no scaling."""


def test_a_model_that_ignores_it_is_refused(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "gemma", GEMMA)
    loader.load(ModelSpec(str(folder)), KVSpec())
    with pytest.raises(SetupError, match=r"does not scale .* of models of type 'gemma'"):
        loader.load(ModelSpec(str(folder), rope=YARN), KVSpec())


def test_the_planner_refuses_it_before_a_download(tmp_path: Path) -> None:
    for config, is_scaled in ((models.CONFIGS["tiny"], True), (GEMMA, False)):
        files = ModelFiles(config, tmp_path / "config.json")
        preset = Preset(model=ModelSpec("org/model", rope=YARN))
        found = of_files(preset, files)
        assert found.n_trained == 4 * 8192
        if is_scaled:
            assert found.shape.has_scaled_rope
        else:
            with pytest.raises(Unsupported, match="does not scale the rotary embedding"):
                found.shape  # noqa: B018 - a property that raises


def test_a_config_without_the_length_of_the_training_is_refused(model_of: ModelOf) -> None:
    with pytest.raises(SetupError, match="no max_position_embeddings to scale"):
        loader.load(ModelSpec(str(model_of("tiny-sinks")), rope=YARN), KVSpec())


def test_a_model_that_scales_already_is_refused(model_of: ModelOf, tmp_path: Path) -> None:
    folder = written(tmp_path / "scaled", model_of("tiny"), YARN)
    with pytest.raises(SetupError, match="scales its rotary embedding already"):
        loader.load(ModelSpec(str(folder), rope=LINEAR), KVSpec())


def test_scaled_and_plain_share_no_kv(model_of: ModelOf, tmp_path: Path) -> None:
    base = preset_of(model_of("tiny"))
    scaled = Preset(model=ModelSpec(base.model.id, rope=YARN), slots=base.slots)
    mine = prompt(200, seed=1)
    with running(base, tmp_path) as driver:
        driver.answer(mine)
    with running(scaled, tmp_path) as driver:
        ask = driver.submit(mine)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == 0
        follow_up = mine + tuple(driver.tokens(ask)) + prompt(20, seed=2)
        cold = driver.cold(follow_up, slot=1)
        assert driver.answer(follow_up) == cold
    with running(scaled, tmp_path) as driver:
        assert driver.answer(follow_up) == cold
