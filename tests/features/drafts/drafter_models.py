"""Tiny random drafters in the form of published ones."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstack.models.drafter_configs import DrafterKind
from tests.models import _spread

BLOCK = 5
MASK = 3
N_DRAFT_VOCAB = 640
"""Tokens that an EAGLE-3 drafter may draft, a part of the vocabulary."""


def add_drafter(target: Path, folder: Path, kind: DrafterKind, seed: int = 5, **more: Any) -> Path:
    """Write a random drafter for the model in `target`; `more` are keys of its config.json."""
    config = config_for(target, kind) | more
    mx.random.seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _random(shape) for name, shape in shapes_of(config, kind).items()}
    if kind is DrafterKind.EAGLE3:
        n_vocab = config["vocab_size"]
        # Every draft token is a later token of the target, in the same order.
        targets = mx.sort(mx.random.permutation(n_vocab)[:N_DRAFT_VOCAB]).astype(mx.int64)
        tensors["d2t"] = targets - mx.arange(N_DRAFT_VOCAB)
        tensors["t2d"] = mx.zeros((n_vocab,), mx.bool_)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_for(target: Path, kind: DrafterKind) -> dict[str, Any]:
    """config.json of a drafter, with the keys of published ones."""
    model = json.loads((target / "config.json").read_text())
    own = model.get("text_config") or model
    n_layers = own["num_hidden_layers"]
    shared = {
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": own["hidden_size"],
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": own["vocab_size"],
    }
    taps = [0, n_layers - 2]
    match kind:
        case DrafterKind.EAGLE3:
            return shared | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": N_DRAFT_VOCAB,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, n_layers]},
                "model_type": "llama",
                "num_hidden_layers": 1,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
            }
        case DrafterKind.DFLASH:
            return shared | {
                "architectures": ["DFlashDraftModel"],
                "block_size": BLOCK,
                "dflash_config": {"mask_token_id": MASK, "target_layer_ids": taps},
                "layer_types": ["full_attention", "full_attention"],
                "model_type": "qwen3",
                "num_hidden_layers": 2,
                "num_target_layers": n_layers,
                "rope_theta": 10000.0,
            }
    return shared | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            "block_size": BLOCK,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "final_logit_softcapping": 20.0,
            "mask_token_id": MASK,
            "output_multiplier": 0.5,
            "selector_rank": 8,
            "selector_top_k": 4,
            "target_layer_ids": taps,
        },
        "is_causal": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": n_layers,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 48,
        "use_sliding_window": True,
    }


def shapes_of(config: dict[str, Any], kind: DrafterKind) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by their published names."""
    dim = config["hidden_size"]
    n_queries = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    inner = config["intermediate_size"]
    n_inputs = 2 * dim if kind is DrafterKind.EAGLE3 else dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (n_queries, n_inputs),
        "self_attn.k_proj.weight": (kv, n_inputs),
        "self_attn.v_proj.weight": (kv, n_inputs),
        "self_attn.o_proj.weight": (dim, n_queries),
        "mlp.gate_proj.weight": (inner, dim),
        "mlp.up_proj.weight": (inner, dim),
        "mlp.down_proj.weight": (dim, inner),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (dim,)}
    if kind is DrafterKind.EAGLE3:
        layer["hidden_norm.weight"] = (dim,)
        shapes["fc.weight"] = (dim, 3 * dim)
        shapes["lm_head.weight"] = (config["draft_vocab_size"], dim)
        return shapes | {f"midlayer.{name}": shape for name, shape in layer.items()}
    own = config["dflash_config"]
    layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config["head_dim"],)
    shapes["fc.weight"] = (dim, len(own["target_layer_ids"]) * dim)
    shapes["hidden_norm.weight"] = (dim,)
    if kind is DrafterKind.DFLASH2:
        size = own["conv_kernel_size"]
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, size, dim)
            rows = 2 * size * dim // own["conv_group_size"]
            layer[f"{conv}.kernel_projection.weight"] = (rows, dim)
        rank = own["selector_rank"]
        for table in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{table}"] = (config["vocab_size"], rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, dim)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _random(shape: tuple[int, ...]) -> mx.array:
    if len(shape) == 1:
        return mx.random.uniform(0.5, 1.5, shape)
    return _spread(mx.zeros(shape))
