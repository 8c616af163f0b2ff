"""Scaled rotary embeddings: mlx-lm's, never silently ignored, and part of what KV depends on."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.core.preset import KVSpec, ModelSpec, Preset, RopeSpec, RopeType
from mlxstack.engine.loading import loader
from mlxstack.models.model_files import ModelFiles, read_config
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


MOE = models.EXPERTS
"""A model whose code in mlx-lm has a base, and no scaling."""
PHI3 = models.LLAMA | {"model_type": "phi3"}
N_ROTATED = models.LLAMA["hidden_size"] // models.LLAMA["num_attention_heads"] // 2
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FOUR = {"factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0] * N_ROTATED, "long_factor": [2.0] * N_ROTATED}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
ABSENT = object()


@pytest.mark.parametrize(
    ("config", "flat", "written"),
    [
        (models.LLAMA, {"rope_theta": 5e5}, {"rope_theta": ABSENT, "rope_parameters": PLAIN}),
        (models.LLAMA, {"rope_theta": 5e5}, {"rope_theta": 1e4, "rope_parameters": PLAIN}),
        (
            models.LLAMA,
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        ),
        (
            models.LLAMA,
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **FOUR}},
            {"rope_scaling": {"rope_type": "yarn", **FOUR}, "rope_parameters": PLAIN},
        ),
        (
            models.LLAMA,
            {"rope_scaling": {"type": "yarn", **FOUR}, "max_position_embeddings": 64},
            {
                "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": None},
                "max_position_embeddings": 64,
            },
        ),
        (MOE, {"rope_theta": 5e5}, {"rope_theta": ABSENT, "rope_parameters": PLAIN}),
        (
            models.SLIDING,
            {
                "rope_theta": 5e5,
                "rope_local_base_freq": 5e3,
                "rope_scaling": {"type": "linear", "factor": 8.0},
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"},
                }
            },
        ),
        (
            PHI3,
            {
                "rope_scaling": {"type": "longrope", **LONG},
                "original_max_position_embeddings": 64,
            },
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                    **LONG,
                }
            },
        ),
        (
            PHI3,
            {"rope_scaling": {"type": "linear", "factor": 2.0, **LONG}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2, **LONG}},
        ),
    ],
)  # fmt: skip
def test_keys_of_transformers_5_are_those_of_mlx_lm(
    tmp_path: Path, config: dict[str, Any], flat: dict[str, Any], written: dict[str, Any]
) -> None:
    tokens = mx.array([prompt(100, seed=1)])
    theirs, _ = load_model(models.write(tmp_path / "flat", config | flat))
    folder = models.write(tmp_path / "model", config | {"rope_theta": 1e4})
    file = folder / "config.json"
    plain, _ = load_model(folder)
    changed = config | written
    file.write_text(json.dumps({k: v for k, v in changed.items() if v is not ABSENT}))
    ours = loader.load(ModelSpec(str(folder)), KVSpec())
    assert mx.allclose(ours.model(tokens), theirs(tokens), atol=1e-4)
    assert not mx.allclose(ours.model(tokens), plain(tokens), atol=1e-4)


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


@pytest.mark.parametrize(
    ("scaling", "n_ctx"),
    [
        ({"type": "linear", "factor": 4.0}, None), ({"type": "linear", "factor": 1.0}, 8192),
        ({"type": "yarn", **FOUR}, 64), ({"type": "default"}, 8192), (None, 8192),
    ],
)  # fmt: skip
def test_a_scaling_that_mlx_lm_ignores_is_no_silent_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scaling: Any, n_ctx: int | None
) -> None:
    config = MOE | {"rope_theta": 1e4, "rope_scaling": scaling}
    spec = ModelSpec(str(models.write(tmp_path / "model", config)))
    planned = of_files(Preset(model=spec), read_config(Path(spec.id)))
    if n_ctx is None:
        with pytest.raises(SetupError, match=r"scales .* \(linear\), .* of type 'qwen3_moe'"):
            loader.load(spec, KVSpec())
        with pytest.raises(Unsupported, match=r"scales .* \(linear\), .* of type 'qwen3_moe'"):
            planned.shape  # noqa: B018 - a property that raises
        return
    assert loader.load(spec, KVSpec()).facts.n_ctx_train == planned.n_trained == n_ctx
    assert ("good for 64 tokens" in caplog.text) == (n_ctx == 64)


def test_kv_of_a_config_that_was_read_otherwise_is_not_found(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "model", models.LLAMA)
    plain = loader.load(ModelSpec(str(folder)), KVSpec()).facts.identity.code
    file = folder / "config.json"
    file.write_text(json.dumps(models.LLAMA | {"rope_parameters": PLAIN}))
    assert loader.load(ModelSpec(str(folder)), KVSpec()).facts.identity.code != plain


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
