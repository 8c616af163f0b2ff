"""Builds a tiny random model of any type of mlx-lm, in memory."""

import pkgutil
from functools import cache
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
from mlxstack.engine.model import mlx_vlm_models
from tests.matrix import more_configs
from tests.matrix.configs import VARIANTS, VOCAB, config_of, outer_type

HELPERS = (
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
)
LARGEST = 30_000_000


class Unbuildable(Exception):
    """Why there is no tiny model of a type here."""


def model_types() -> list[str]:
    """Every model type that mlx-lm has a file for."""
    files = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return sorted((name for name in files if name not in HELPERS), key=str.lower)


@cache
def mlx_vlm_types() -> frozenset[str]:
    """Every type that mlx-vlm has a folder for and mlx-lm no file; none without the extra."""
    if not mlx_vlm_models.is_installed():
        return frozenset()
    mlx_vlm_models.join()
    import mlx_vlm.models

    folders = {
        module.name for module in pkgutil.iter_modules(mlx_vlm.models.__path__) if module.ispkg
    }
    of_mlx_lm = {name.replace("-", "_").lower() for name in [*model_types(), *MODEL_REMAPPING]}
    return frozenset(folders - of_mlx_lm)


def build(name: str, seed: int = 0, n_vocab: int = VOCAB) -> Any:
    """A model of this type or variant, weights random, seeded, float32. Raises Unbuildable.

    `n_vocab` is for types of mlx-vlm.
    """
    quantization = VARIANTS.get(name, {"adds": {}})["adds"].get("quantization_bits")
    mx.random.seed(seed)
    try:
        model = _model(name, n_vocab)
    except SystemExit as end:
        raise Unbuildable("its file ends the program: it wants a package that is missing") from end
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {error}") from error
    n_params = sum(array.size for _, array in tree_flatten(model.parameters()))
    if n_params > LARGEST:
        raise Unbuildable(f"{n_params:,} parameters are not tiny")
    model.update(tree_map(_spread, model.parameters()))
    if quantization:
        nn.quantize(model, group_size=32, bits=quantization)
    model.eval()
    mx.eval(model.parameters())
    return model


def _model(name: str, n_vocab: int) -> Any:
    if name in mlx_vlm_types():
        return mlx_vlm_models.built(name, more_configs.config_of(name, n_vocab))[0]
    config = config_of(name)
    config.pop("quantization_bits", None)
    model_class, args_class = _get_classes({"model_type": outer_type(name)})
    return model_class(args_class.from_dict(config))


def _spread(array: mx.array) -> mx.array:
    """Random matrices, a little wider than the default, so that outputs vary with inputs."""
    if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
        return array
    return (mx.random.normal(array.shape) * (2.0 / array.shape[-1] ** 0.5)).astype(array.dtype)
