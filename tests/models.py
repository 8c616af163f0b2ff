"""Tiny random models of many architectures, built when a test needs them.

A folder as from a hub: config.json, model.safetensors and, where asked for, the demo tokenizer.
Weights are seeded; float32 unless said, so that ties do not decide greedy tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
from mlxstack.demo import MODEL_DIR

VOCAB = 1024

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

SLIDING: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": VOCAB,
    "sliding_window": 64,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 8192,
}

SINKS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 64,
    "rope_theta": 10000,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 8192,
    "head_dim": 32,
    "tie_word_embeddings": True,
}

LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "max_position_embeddings": 8192,
}

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
