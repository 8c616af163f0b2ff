"""Estimated weights against published sizes, and against the headers of models built here."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.errors import Unsupported
from mlxstack.engine.model.mlx_vlm_models import is_installed
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.features.vision.images.families import n_tower_parameters
from mlxstack.models.model_files import measured, vision_weights
from mlxstack.planner.model_shapes import shapes_of
from mlxstack.policy.memory.capacity import Weights
from tests import vision_models
from tests.conftest import ModelOf
from tests.pages import more_shapes

pytestmark = pytest.mark.mlx

CONFIGS = Path(__file__).parent.parent.parent / "presets" / "configs"

SHIPPED = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
PUBLISHED = {name: config for name, config in SHIPPED.items() if "published_bytes" in config}
"""Shipped configs of which the size of the repository's weight files is known."""

COUNTED = {name: config for name, config in SHIPPED.items() if "published_parameters" in config}
"""Shipped configs of which the number of parameters is known, to three digits or more."""

COARSE = {"gemma4-26b-a4b": 0.02, "qwen3-coder-next": 0.02}
"""Allowed deviations above 1 %: layers and gates quantized to 8 bits, of which one is listed."""

TOWERS = {"qwen4_exp": "qwen3_5"}
"""Types whose tower is not served, by one that has the same."""


def config_of(name: str) -> dict[str, Any]:
    return dict(SHIPPED[name])


def tower(config: dict[str, Any]) -> Weights:
    """Of the vision tower that a config tells of."""
    form = TOWERS.get(config["model_type"], config["model_type"])
    return Weights(n_half=n_tower_parameters(config | {"model_type": form}))


def estimate(config: dict[str, Any]) -> Weights:
    """Of the model that mlx-lm builds from this config."""
    found = shape_of_config(config).weights
    assert found is not None
    return found


def shipped_estimate(name: str) -> Weights:
    """Of a shipped config; of mlx-vlm's types by the stored shape."""
    shape = more_shapes.stored().get(name)
    if shape is None:
        return estimate(SHIPPED[name])
    assert shape.weights is not None
    return shape.weights


@pytest.mark.parametrize("name", PUBLISHED)
def test_a13_estimates_are_what_is_published(name: str) -> None:
    config = PUBLISHED[name]
    expected = config["published_bytes"]
    whole = shipped_estimate(name).plus(tower(config))
    assert whole.n_bytes() == pytest.approx(expected, rel=COARSE.get(name, 0.01))


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3.8-27b"])
def test_a13_published_files_hold_the_vision_tower_to_the_byte(name: str) -> None:
    config = PUBLISHED[name]
    assert estimate(config).plus(tower(config)).n_bytes() == config["published_bytes"]


def test_a13_published_files_of_mlx_vlm_hold_the_estimate_and_their_headers() -> None:
    config = PUBLISHED["qwen3.8-flash-next"]
    tensors = shipped_estimate("qwen3.8-flash-next").plus(tower(config))
    headers = config["published_bytes"] - tensors.n_bytes()
    assert 0 < headers < config["published_files"] * 32 * 1024


def test_the_shapes_of_all_presets_of_mlx_vlm_are_stored() -> None:
    assert more_shapes.stored().keys() == more_shapes.configs().keys()


@pytest.mark.skipif(not is_installed(), reason="it needs the extra more-models (make models)")
@pytest.mark.parametrize("name", more_shapes.configs())
def test_a_stored_shape_is_that_of_mlx_vlm(name: str) -> None:
    # A model of mlx-lm comes first in the child process, as in `mlx-stack presets`.
    plain, reply = shapes_of([SHIPPED["smollm2-135m"] | {"of": name}, SHIPPED[name] | {"of": name}])
    assert plain.shape is not None
    assert reply.shape == more_shapes.stored()[name], f"{reply.refusal}: run `make shapes docs`"


@pytest.mark.parametrize("kind", vision_models.CONFIGS)
def test_a13_the_tower_that_a_config_tells_is_that_of_the_files(tmp_path: Path, kind: str) -> None:
    folder = vision_models.build(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    real = measured(folder)
    in_files = vision_weights(folder)
    assert tower(config).n_half == in_files.n_single > 0
    assert real is not None
    assert estimate(config | {"dtype": "float32"}).n_bytes() == real.n_bytes()


def test_a13_a_tower_of_another_converter_is_not_counted_twice(tmp_path: Path) -> None:
    folder = vision_models.build(tmp_path / "model", "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    in_files = vision_weights(folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    renamed = {name.replace("vision_tower.", "model.visual."): a for name, a in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    assert measured(folder) == estimate(config | {"dtype": "float32"})
    assert vision_weights(folder) == in_files


@pytest.mark.parametrize(
    "vision",
    [None, 3, {}, {"hidden_size": "x" * 99}, {"depth": 1, "hidden_size": 8, "out_hidden_size": 8}],
)
def test_a13_a_tower_that_a_config_tells_in_part_is_not_counted(vision: Any) -> None:
    config = config_of("qwen3.5-9b") | {"vision_config": vision}
    assert n_tower_parameters(config) == 0


@pytest.mark.parametrize("name", COUNTED)
def test_a13_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    config = dict(COUNTED[name])
    assert config["published_parameters_source"].startswith("https://")
    assert config.pop("quantization")["bits"] in {4, 8}
    built = estimate(config)
    assert built.packed == 0
    n_parameters = built.n_half + built.n_single
    assert n_parameters == pytest.approx(config["published_parameters"], rel=0.0012)


@pytest.mark.parametrize("kind", ["tiny", "tiny-swa", "tiny-sinks", "tiny-hybrid", "tiny-mla"])
def test_a13_estimates_are_what_a_real_file_holds(model_of: ModelOf, kind: str) -> None:
    folder = model_of(kind)
    real = measured(folder)
    assert real is not None
    guess = estimate(json.loads((folder / "config.json").read_text()) | {"dtype": "float32"})
    assert guess.n_bytes() == real.n_bytes()


def test_a13_experts_in_mxfp4_and_the_rest_in_eight_bits() -> None:
    weights = estimate(config_of("gpt-oss-20b"))
    experts = 24 * 32 * 3 * 2880 * 2880
    others = 2 * 201088 * 2880 + 24 * 2880 * 64 * (64 + 8 + 8 + 64)
    routers = 24 * 32 * 2880
    biases = 24 * (32 * 3 * 2880 + 32 + 2 * 4096 + 2880 + 2 * 512 + 64)
    norms = 49 * 2880
    groups = 2 * ((others + routers) // 64)
    assert weights.n_half == pytest.approx(groups + biases + norms, rel=0.01)
    assert weights.packed == experts * 4.25 / 8 + others + routers


def test_a6_half_precision_is_wider_on_a_cpu() -> None:
    weights = Weights(packed=100, n_half=10, n_single=1)
    assert weights.n_bytes() == 124
    assert weights.n_bytes(half_bytes=4) == 144


def test_f9_weights_that_only_files_tell_are_not_guessed() -> None:
    config = config_of("qwen3-coder-30b-a3b")
    del config["quantization"]
    assert shape_of_config(config | {"quantization_config": {}}).weights is None


def test_f9_weights_of_a_method_that_mlx_lm_does_not_read_are_refused() -> None:
    config = config_of("qwen3-coder-30b-a3b")
    del config["quantization"]
    with pytest.raises(Unsupported, match="no weights that bitsandbytes quantized"):
        estimate(config | {"quantization_config": {"quant_method": "bitsandbytes"}})


def test_f9_a_quantization_config_of_null_says_nothing() -> None:
    config = config_of("qwen3-coder-30b-a3b")
    del config["quantization"]
    assert estimate(config | {"quantization_config": None}) == estimate(config)


def test_f9_a_missing_number_is_named() -> None:
    config = {k: v for k, v in config_of("qwen3-coder-30b-a3b").items() if k != "hidden_size"}
    with pytest.raises(Unsupported, match="hidden_size"):
        estimate(config)


def test_every_shipped_shape_is_checked_against_a_published_figure() -> None:
    unchecked = SHIPPED.keys() - PUBLISHED.keys() - COUNTED.keys()
    assert not unchecked, "presets/configs needs `published_bytes` or `published_parameters` in it"
    for name, config in SHIPPED.items():
        head = (CONFIGS.parent / f"{name}.yaml").read_text().partition("name:")[0]
        told = " ".join(line.removeprefix("# ") for line in head.splitlines())
        assert "published" in told, f"presets/{name}.yaml does not name its published figure"
        assert config["source"].startswith("https://")
