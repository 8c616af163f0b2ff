"""Random Llama with the demo tokenizer: real shapes, no download."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer

from mlxstack.bench.dev.trials import BuildModel
from mlxstack.demo import MODEL_DIR

HEAD_DIM = 64
DIGITS = frozenset("0123456789")
"""Each of them is a token of its own, and the same one when an answer comes back as history."""

WORDS_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build(trial: BuildModel) -> None:
    """Write the model; the same seed gives the same bytes."""
    folder = Path(trial.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in WORDS_OF_A_TOKENIZER:
        shutil.copy(MODEL_DIR / name, folder / name)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    config = _config(trial, tokenizer.get_vocab_size())
    mx.random.seed(trial.seed)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    weights["lm_head.weight"] = _digits_only(weights["lm_head.weight"], tokenizer)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))


def _config(trial: BuildModel, n_vocab: int) -> dict[str, Any]:
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
        "vocab_size": n_vocab,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).token_to_id(
            "<|im_end|>"
        ),
    }


def _digits_only(head: mx.array, tokenizer: Tokenizer) -> mx.array:
    """Output head with zero rows for all tokens but digits."""
    is_digit = [tokenizer.id_to_token(i) in DIGITS for i in range(head.shape[0])]
    return mx.where(mx.array(is_digit)[:, None], head, 0.0)
