"""Odd quantization tables: sizes are planned wherever the weights load."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.core.preset import KVSpec, ModelSpec, Preset
from mlxstack.engine.loading import loader
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.models.model_files import quantization_in, read_config
from mlxstack.planner.candidate import of_files
from tests import models

pytestmark = pytest.mark.mlx

SIZES = {"group_size": 32, "bits": 4}
DOWN = "model.layers.0.mlp.down_proj"
"""A projection that is stored otherwise."""
FOUR = {"group_size": 64, "bits": 8}


def quantized(folder: Path, table: Any, stored: Any = None, **more: Any) -> Path:
    """Folder of a quantized model, whose config.json has this table.

    `stored`: storage of the layer `DOWN`, as a class predicate says it.
    """
    models.write(folder, models.LLAMA)
    model, _ = load_model(folder)
    kept = True if stored is None else stored
    nn.quantize(
        model,
        **SIZES,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and (kept if path == DOWN else True)
        ),
    )
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = models.LLAMA | {"dtype": "float32", "quantization": table} | more
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("table", "stored"),
    [
        (SIZES, None),
        # Sizes that no weights have: the loader takes those of the files.
        ({"group_size": None, "bits": None, "mode": "affine"}, None),
        ({"group_size": None, "bits": None, "mode": None}, None),
        ({"group_size": 32, "bits": 7}, None),
        ({"group_size": 48, "bits": 4}, None),
        ({"group_size": 32, "bits": 4, "mode": "mixed_4_8"}, None),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, None),
        ({"group_size": "32", "bits": "4"}, None),
        # Layers of their own.
        ({**SIZES, DOWN: False}, False),
        ({**SIZES, DOWN: None}, False),
        ({**SIZES, DOWN: {}}, False),
        ({**SIZES, DOWN: FOUR}, FOUR),
        ({**SIZES, DOWN: {"bits": 8}}, {"bits": 8}),
        ({**SIZES, DOWN: {"mode": "mxfp4"}}, {"mode": "mxfp4"}),
        ({**SIZES, DOWN: {"mode": "nvfp4"}}, {"mode": "nvfp4"}),
        ({**SIZES, "model.norm": False, "model.no_such_layer": FOUR}, None),
    ],
)
def test_what_loads_is_sized(tmp_path: Path, table: Any, stored: Any) -> None:
    folder = quantized(tmp_path / "model", table, stored)
    loaded = loader.load(ModelSpec(str(folder)), KVSpec())
    files = read_config(folder)
    found = of_files(Preset(model=ModelSpec(str(folder))), files)
    assert found.geometry().n_bytes(4096) > 0
    assert found.weights == files.weights
    assert found.weights.n_bytes(half_bytes=4) == loaded.facts.n_bytes


@pytest.mark.parametrize(
    "beside",
    [
        {"quantization_config": SIZES},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"quantization_config": {"quant_method": None, "bits": 8}},
        {"text_config": None, "quantization_config": {}},
    ],
)
def test_a_table_beside_that_of_mlx_counts_for_nothing(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    folder = quantized(tmp_path / "model", SIZES, **beside)
    loader.load(ModelSpec(str(folder)), KVSpec())
    files = read_config(folder)
    assert quantization_in(files.config) == "4 bit"
    built = shape_of_config(files.config).weights
    assert built is not None
    assert built == files.weights


def test_a_table_of_null_leaves_the_one_beside_it(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "model", None, quantization_config={"quant_method": "mxfp4"})
    loader.load(ModelSpec(str(folder)), KVSpec())
    assert shape_of_config(read_config(folder).config).weights is None


@pytest.mark.parametrize("key", SIZES)
def test_a_table_without_its_sizes_is_refused_by_both(tmp_path: Path, key: str) -> None:
    folder = quantized(tmp_path / "model", {k: v for k, v in SIZES.items() if k != key})
    with pytest.raises(SetupError, match=key):
        loader.load(ModelSpec(str(folder)), KVSpec())
    with pytest.raises(Unsupported, match=f"lacks '{key}'"):
        shape_of_config(read_config(folder).config)


@pytest.mark.parametrize(("mode", "n_bits"), [("mxfp4", 4.25), ("nvfp4", 4.5), ("affine", 4.5)])
def test_a_mode_has_the_sizes_of_mlx_where_a_config_has_null(mode: str, n_bits: float) -> None:
    table = {"group_size": None, "bits": None, "mode": mode}
    sized = shape_of_config(models.LLAMA | {"quantization": table}).weights
    plain = shape_of_config(models.LLAMA).weights
    assert sized is not None
    assert plain is not None
    assert sized.n_bytes() == pytest.approx(plain.n_half * n_bits / 8, rel=0.01)
