"""Random Llama with the demo tokenizer and a vision tower."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from msgspec import convert
from tokenizers import Tokenizer

from mlxstack.bench.dev.trials import BuildModel
from mlxstack.demo import MODEL_DIR
from mlxstack.features.vision.images.checkpoint import TOWER
from mlxstack.features.vision.images.pixtral import PLACEHOLDER
from mlxstack.features.vision.towers.pixtral import PixtralTower, PixtralVision

HEAD_DIM = 64
DIGITS = frozenset("0123456789")
"""Each of them is a token of its own, and the same one when an answer comes back as history."""

VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 12,
    "patch_size": 14,
    "rope_theta": 10000.0,
}
MAX_EDGE = 784
"""Pixels, so that an image has 784 features at most."""

WORDS_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build(trial: BuildModel) -> None:
    """Write the model; the same seed gives the same bytes."""
    folder = Path(trial.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in WORDS_OF_A_TOKENIZER:
        shutil.copy(MODEL_DIR / name, folder / name)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    config = _config(trial, tokenizer)
    mx.random.seed(trial.seed)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    weights["lm_head.weight"] = _digits_only(weights["lm_head.weight"], tokenizer)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    _add_tower(folder, config)


def _add_tower(folder: Path, config: dict[str, Any]) -> None:
    """Random tower of Pixtral's kind, beside the text model."""
    settings = {"text_config": config} | config | VISION
    weights = {}
    for name, array in tree_flatten(PixtralTower(convert(settings, PixtralVision)).parameters()):
        is_tower = not name.startswith("multi_modal_projector.")
        weights[f"vision_tower.{name}" if is_tower else name] = array
    side = VISION["patch_size"]
    patches = weights["vision_tower.patch_conv.weight"]
    weights["vision_tower.patch_conv.weight"] = patches.reshape(-1, side, side, 3)
    mx.save_safetensors(str(folder / TOWER), weights)
    size = {"size": {"longest_edge": MAX_EDGE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(size))


def _config(trial: BuildModel, tokenizer: Tokenizer) -> dict[str, Any]:
    n_heads = trial.width // HEAD_DIM
    return {
        "model_type": "llama",
        "hidden_size": trial.width,
        "num_hidden_layers": trial.n_layers,
        "intermediate_size": 3 * trial.width,
        "num_attention_heads": n_heads,
        "num_key_value_heads": max(1, n_heads // 2),
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "vision_config": VISION,
        "image_token_id": tokenizer.token_to_id(PLACEHOLDER),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }


def _digits_only(head: mx.array, tokenizer: Tokenizer) -> mx.array:
    """Output head with zero rows for all tokens but digits."""
    is_digit = [tokenizer.id_to_token(i) in DIGITS for i in range(head.shape[0])]
    return mx.where(mx.array(is_digit)[:, None], head, 0.0)
