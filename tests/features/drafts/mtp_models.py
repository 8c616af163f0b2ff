"""Tiny models with an MTP head, in the layout of published checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlxstack.models.mtp_layouts import LAYOUTS
from tests.models import _spread

FILE = "mtp.safetensors"
CONVERTED = {"format": "mlx"}
"""Metadata of weight files that mlx-lm wrote."""


def add_head(source: Path, folder: Path, seed: int = 5) -> Path:
    """Copy a model into `folder`, and write a random head beside it."""
    shutil.copytree(source, folder)
    mx.save_safetensors(str(folder / FILE), random_head(folder, seed), CONVERTED)
    return folder


def random_head(folder: Path, seed: int) -> dict[str, mx.array]:
    """Tensors of a random head for the model, by their published names."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    layout = LAYOUTS[config["model_type"]]
    model_class, args_class = _get_classes(config)
    layers = model_class(args_class.from_dict(config)).layers
    layer = next(layer for layer in reversed(layers) if "self_attn" in layer)
    mx.random.seed(seed)
    dim = text["hidden_size"]
    tensors = {layout.layer + name: _spread(a) for name, a in tree_flatten(layer.parameters())}
    tensors |= {
        f"{name}.weight": mx.random.uniform(0.5, 1.5, (dim,))
        for name in (layout.embedding_norm, layout.hidden_norm, layout.norm)
    }
    tensors[f"{layout.projection}.weight"] = _spread(mx.zeros((dim, 2 * dim)))
    prefix = layout.prefix.format(n=text["num_hidden_layers"])
    return {prefix + name: a for name, a in tensors.items()}
