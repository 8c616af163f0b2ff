"""Tiny random models of many architectures, built when a test needs them.

A folder as from a hub: config.json, model.safetensors and, where asked for, the demo tokenizer.
Weights are seeded; float32 unless said, so that ties do not decide greedy tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
from mlxstack.demo import MODEL_DIR

VOCAB = 1024
TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
)
LLAMA = TABLE["llama"]
SLIDING = TABLE["sliding"]
SINKS = TABLE["sinks"]
EXPERTS = TABLE["experts"]
HYBRID = TABLE["hybrid"]
LATENT = TABLE["latent"]

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": LLAMA,
    "tiny-swa": SLIDING,
    "tiny-sinks": SINKS,
    "tiny-hybrid": HYBRID,
    "tiny-mla": LATENT,
}


def build(folder: Path, kind: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Path:
    """Write the model `kind` of CONFIGS into `folder`; the same seed gives the same bytes."""
    return write(folder, CONFIGS[kind], seed, dtype)


def write(
    folder: Path, config: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32
) -> Path:
    """Write a random model of this config, with the demo tokenizer, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    weights = tree_map(lambda a: _spread(a).astype(dtype), model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(weights)))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (MODEL_DIR / name).exists():
            shutil.copy(MODEL_DIR / name, folder / name)
    return folder


def _spread(array: mx.array) -> mx.array:
    """Random matrices, a little wider than the default, so that outputs vary with inputs."""
    if array.ndim < 2:
        return array
    return mx.random.normal(array.shape) * (2.0 / array.shape[-1] ** 0.5)
