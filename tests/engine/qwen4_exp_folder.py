"""Tiny random models of type `qwen4_exp`, as Hugging Face lays out their folders.

NumPy alone: transformers and mlx-vlm read the same files.
"""

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

N_VOCAB = 1024
"""Tokens of the demo's tokenizer."""
EOS = 2
N_PROMPT = 300
LENGTHS = (N_PROMPT, 171, 64, 23)
N_ANSWERED = 12
EVERY = 16
"""Of the vocabulary, every so manyth logit is kept."""
INDEX = "model.safetensors.index.json"
WEIGHTS = "model-00001-of-00001.safetensors"
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15

Config = dict[str, Any]
Shape = tuple[int, ...]

SHARED: Config = {
    "model_type": "qwen4_exp_text",
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hc_count": 2,
    "hc_lowrank": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "ple_conv_kernel_size": 4,
    "make_ngram_vocab_size_divisible_by": 8,
    "ngram_vocab_size_base": 500,
    "seed": 1234,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
"""Text config; what the models differ in stands in CONFIGS."""
CONFIGS: dict[str, Config] = {
    # One sparse layer, with the blocks, heads of the indexer and n-grams of Qwen3.8-Flash-Next.
    "one": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "split_ngram_parts": 2,
        "indexer_n_heads": 4,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
    },
    # Two sparse layers between two with n-gram tables.
    "two": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 96,
        "ngram_size": 4,
        "heads_per_ngram": 2,
        "split_ngram_parts": 5,
        "hc_count": 3,
        "indexer_n_heads": 12,
        "indexer_budget": 24,
        "indexer_compress_ratio": 8,
        "output_gate_type": "silu",
    },
}

# Blocks of which every head scores zero are frequent.
CONFIGS["ties"] = {**CONFIGS["two"], "indexer_n_heads": 1}


def text_config(kind: str) -> Config:
    """Text config of one of CONFIGS."""
    return {**SHARED, **CONFIGS[kind]}


def write(folder: Path, kind: str) -> Path:
    """Write config and weights, without those of the vision tower."""
    folder.mkdir(parents=True, exist_ok=True)
    text = text_config(kind)
    config = {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": EOS,
        "text_config": text,
        "vision_config": {
            "model_type": "qwen4_exp_vision",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
    }
    weights = dict(_weights(text))
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(seed: int) -> list[int]:
    """Random tokens with repeated n-grams, and ends of texts between them."""
    random = np.random.default_rng(seed)
    tokens = random.integers(3, N_VOCAB, N_PROMPT)
    repeats = random.integers(0, N_PROMPT - 40, 3)
    for place in repeats:
        tokens[place + 20 : place + 40] = tokens[place : place + 20]
    tokens[random.integers(0, N_PROMPT, 5)] = EOS
    return [int(token) for token in tokens]


def prompts() -> list[list[int]]:
    """Prompts of rows that decode together; the first one is the longest, and no answer ends."""
    return [prompt(2 * row)[:n] for row, n in enumerate(LENGTHS)]


def _weights(config: Config) -> Iterator[tuple[str, np.ndarray]]:
    for name, shape in _shapes(config):
        yield name, _random(name, shape)
    for n_before, number in enumerate(config["ple_layer_ids"]):
        table = f"model.language_model.layers.{number - 1}.ple.ple_embedding"
        sizes = _table_sizes(config, n_before)
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        yield f"{table}.ngram_heads_vocab_sizes", np.array(sizes, np.int64)
        yield f"{table}.ngram_heads_offsets", np.array(offsets, np.int64)
        yield f"{table}.layer_multipliers", np.array(_multipliers(config, n_before), np.int64)


def _random(name: str, shape: Shape) -> np.ndarray:
    """Weights by their name, wide enough that outputs depend on inputs."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    normal = random.standard_normal(shape)
    if name.endswith("linear_attn.norm.weight"):
        values = 1 + 0.2 * normal
    elif len(shape) == 1:
        # Norms are centered at zero; so are A_log and dt_bias.
        values = 0.3 * normal
    elif "embed" in name:
        values = normal
    else:
        # Wider matrices amplify rounding: a gate is the root of a sum near zero.
        values = normal * (1.2 / math.sqrt(shape[-1]))
    return values.astype(np.float32)


def _shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    yield "lm_head.weight", (N_VOCAB, hidden)
    model = "model.language_model"
    yield f"{model}.embed_tokens.weight", (N_VOCAB, hidden)
    yield from _hyper_connection(f"{model}.hyper_connection_mixer", config, injects=False)
    for i, kind in enumerate(config["layer_types"]):
        layer = f"{model}.layers.{i}"
        yield from _hyper_connection(f"{layer}.attn_hyper_connection", config)
        yield from _hyper_connection(f"{layer}.mlp_hyper_connection", config)
        yield from _experts(f"{layer}.mlp", config)
        if kind == "linear_attention":
            yield from _linear_attention(f"{layer}.linear_attn", config)
        else:
            yield from _sparse_attention(f"{layer}.self_attn", config)
        if i + 1 in config["ple_layer_ids"]:
            n_before = config["ple_layer_ids"].index(i + 1)
            yield from _layer_embedding(f"{layer}.ple", config, n_before)


def _hyper_connection(
    name: str, config: Config, injects: bool = True
) -> Iterator[tuple[str, Shape]]:
    width = config["hidden_size"] * config["hc_count"]
    rank = config["hc_lowrank"]
    yield f"{name}.hc_norm.weight", (width,)
    yield f"{name}.input_mix_weight_down.weight", (rank, width)
    yield f"{name}.input_mix_weight_up.weight", (width, rank)
    if injects:
        yield f"{name}.block_inject_weight.weight", (config["hc_count"], width)


def _experts(name: str, config: Config) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    experts = [f"experts.{i}" for i in range(config["num_experts"])]
    yield f"{name}.gate.weight", (config["num_experts"], hidden)
    yield f"{name}.shared_expert_gate.weight", (1, hidden)
    for part in [*experts, "shared_expert"]:
        is_shared = part == "shared_expert"
        key = "shared_expert_intermediate_size" if is_shared else "moe_intermediate_size"
        yield f"{name}.{part}.gate_proj.weight", (config[key], hidden)
        yield f"{name}.{part}.up_proj.weight", (config[key], hidden)
        yield f"{name}.{part}.down_proj.weight", (hidden, config[key])


def _linear_attention(name: str, config: Config) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    n_heads = config["linear_num_value_heads"]
    keys = config["linear_key_head_dim"] * config["linear_num_key_heads"]
    values = config["linear_value_head_dim"] * n_heads
    yield f"{name}.A_log", (n_heads,)
    yield f"{name}.dt_bias", (n_heads,)
    yield f"{name}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield f"{name}.in_proj_qkv.weight", (2 * keys + values, hidden)
    yield f"{name}.in_proj_z.weight", (values, hidden)
    yield f"{name}.in_proj_a.weight", (n_heads, hidden)
    yield f"{name}.in_proj_b.weight", (n_heads, hidden)
    yield f"{name}.norm.weight", (config["linear_value_head_dim"],)
    yield f"{name}.out_proj.weight", (hidden, values)


def _sparse_attention(name: str, config: Config) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    size = config["head_dim"]
    n_queries = config["num_attention_heads"] * size
    n_keys = config["num_key_value_heads"] * size
    n_index = config["indexer_n_heads"] + config["indexer_kv_heads"]
    # Each query has a gate beside it.
    yield f"{name}.q_proj.weight", (2 * n_queries, hidden)
    yield f"{name}.k_proj.weight", (n_keys, hidden)
    yield f"{name}.v_proj.weight", (n_keys, hidden)
    yield f"{name}.o_proj.weight", (hidden, n_queries)
    yield f"{name}.q_norm.weight", (size,)
    yield f"{name}.k_norm.weight", (size,)
    index = f"{name}.indexer"
    yield f"{index}.index_qk_proj.weight", (n_index * config["indexer_head_dim"], hidden)
    yield f"{index}.q_layernorm.weight", (config["indexer_head_dim"],)
    yield f"{index}.k_layernorm.weight", (config["indexer_head_dim"],)


def _layer_embedding(name: str, config: Config, n_before: int) -> Iterator[tuple[str, Shape]]:
    width = config["hidden_size"] * config["hc_count"]
    size = config["ple_embed_dim"]
    yield f"{name}.key_proj.weight", (width, size)
    yield f"{name}.value_proj.weight", (config["hidden_size"], size)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield f"{name}.{norm}.weight", (width,)
    yield f"{name}.conv1d.weight", (width, 1, config["ple_conv_kernel_size"])
    sizes = _table_sizes(config, n_before)
    divisor = config["make_ngram_vocab_size_divisible_by"]
    n_rows = math.ceil(sum(sizes) / divisor) * divisor
    n_parts = config["split_ngram_parts"]
    for part in range(n_parts):
        rows = n_rows // n_parts + (part < n_rows % n_parts)
        table = f"{name}.ple_embedding.ngram_embedding.shard_{part}.weight"
        yield table, (rows, size // len(sizes))


def _table_sizes(config: Config, n_before: int) -> list[int]:
    """Rows of the n-gram tables of a layer: a prime number for each head of any layer."""
    n_heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    primes: list[int] = []
    candidate = config["ngram_vocab_size_base"]
    while len(primes) < n_heads * (n_before + 1):
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes[-n_heads:]


def _multipliers(config: Config, n_before: int) -> list[int]:
    """Odd factors of the hash of an n-gram, by splitmix64; no product overflows 63 bits."""
    bound = ((1 << 63) - 1) // N_VOCAB // 2
    multipliers = []
    for i in range(config["ngram_size"]):
        value = config["seed"] + 10007 * n_before + GAMMA * (i + 2)
        value = (value ^ (value & MASK) >> 30) * 0xBF58476D1CE4E5B9
        value = (value ^ (value & MASK) >> 27) * 0x94D049BB133111EB
        value = (value ^ (value & MASK) >> 31) & MASK
        multipliers.append(2 * (value % bound) + 1)
    return multipliers
