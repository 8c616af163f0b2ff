"""The geometry says what mlx-lm allocates: real tiny models, real caches."""

import copy
import importlib
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.cache import make_prompt_cache as make_caches

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
from mlxstack.engine.model import model_shape
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.policy.memory.capacity import Geometry, Layer, LayerKind, quantized
from tests.policy.allocation import allocated_bytes, peak_bytes

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "vocab_size": 50,
    "max_position_embeddings": 1000,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bias": False,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
}
WIDE = {"head_dim": 24}
SLIDING = {
    **WIDE,
    "sliding_window": 8,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_scaling": None,
    "use_qk_norm": True,
}
LATENT = {
    **ROUTED,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
YARN = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 99,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DELTA = {
    **WIDE,
    **EXPERTS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
CONV = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": (["conv"] * 3 + ["full_attention"]) * 2,
}
GPT2 = {"n_embd": 128, "n_head": 4, "n_layer": 8, "n_inner": 64, "n_positions": 99, "n_ctx": 99}
GRANITE = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
ERNIE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "moe_use_aux_free": False,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
}
GEMMA3N = {
    **SLIDING,
    "num_kv_shared_layers": 2,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2
    + ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 50,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.0] * 8,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
GEMMA4 = {
    **SLIDING,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "vocab_size_per_layer_input": 50,
    "hidden_size_per_layer_input": 0,
}
LLAMA4 = {
    **WIDE,
    **EXPERTS,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 32,
    "rope_scaling": None,
    "use_qk_norm": True,
}

PLAIN: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "dots1": WIDE | ROUTED,
    "ernie4_5": WIDE,
    "gemma": WIDE,
    "gemma2": SLIDING,
    "glm": WIDE,
    "glm4": WIDE,
    "glm4_moe": WIDE | ROUTED,
    "nemotron": WIDE,
    "olmo2": WIDE,
    "olmoe": WIDE | EXPERTS,
    "qwen3": WIDE,
    "qwen3_moe": WIDE | EXPERTS,
    "seed_oss": WIDE,
    "smollm3": WIDE,
    "nanbeige": WIDE | {"num_loops": 2},
    "exaone": {"num_layers": 8},
    "cohere": WIDE,
    "granite": WIDE | GRANITE,
    "granitemoe": WIDE | GRANITE | EXPERTS,
    "helium": WIDE,
    "internlm2": WIDE,
    "internlm3": WIDE,
    "mixtral": WIDE | EXPERTS,
    "phi": WIDE,
    "phi3": WIDE,
    "phimoe": WIDE | EXPERTS,
    "qwen2": WIDE,
    "qwen2_moe": WIDE | EXPERTS,
    "stablelm": WIDE | {"use_qkv_bias": False, "rope_pct": 0.25},
    "starcoder2": WIDE,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2 | {"multi_query": True},
    "hunyuan_v1_dense": WIDE | {"use_qk_norm": True},
    "mimo": WIDE,
    "telechat3": WIDE,
    "solar_open": WIDE | ROUTED,
    "Klear": WIDE | EXPERTS | {"n_shared_experts": 1},
    "apertus": WIDE | {"post_norm": False, "qk_norm": True},
    "bailing_moe": WIDE | EXPERTS | {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek": WIDE | ROUTED,
    "ernie4_5_moe": WIDE | ERNIE,
    "nanochat": WIDE,
    "minimax": WIDE | EXPERTS | {"shared_intermediate_size": 32, "rotary_dim": 8},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "llama": SLIDING,
    "ministral3": SLIDING
    | {
        "rope_parameters": {
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 99,
        }
    },
    "mellum": SLIDING
    | EXPERTS
    | {
        "rope_parameters": {t: {"rope_theta": 1e4} for t in ("sliding_attention", "full_attention")}
    },
    "afmoe": SLIDING | EXPERTS,
    "laguna": SLIDING | EXPERTS,
    "muse_glimmer": SLIDING,
    "exaone_moe": SLIDING | EXPERTS | {"is_moe_layer": [False] * 8, "num_shared_experts": 1},
    "gemma3_text": SLIDING | {"sliding_window_pattern": 3},
    "gpt_oss": SLIDING | EXPERTS,
    "olmo3": SLIDING,
    "exaone4": WIDE | {"sliding_window": 8, "sliding_window_pattern": "LLLG", "rope_scaling": None},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 4},
    "gemma4_text": GEMMA4,
}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "deepseek_v2": LATENT | {"topk_method": "greedy", "rope_scaling": YARN},
    "youtu_llm": LATENT,
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS | {"use_expert_bias": False, "num_dense_layers": 1},
}
MISTRAL4 = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 99}
NESTED: dict[str, dict[str, Any]] = {
    "gemma3": SLIDING | {"sliding_window_pattern": 3, "model_type": "gemma3_text"},
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4 | {"model_type": "gemma4_text"},
    "llama4": LLAMA4,
    "mistral3": WIDE | {"model_type": "mistral"},
    "qwen3_vl": WIDE,
    "kimi_vl": LATENT,
    "kimi_k25": LATENT,
    "qwen2_vl": WIDE,
    "qwen3_vl_moe": WIDE | EXPERTS,
    "qwen3_5_moe": DELTA,
}
INNER_MISTRAL4 = LATENT | {"model_type": "mistral4", "rope_parameters": MISTRAL4}
FLAT = [(t, c) for table in (PLAIN, WINDOWED, OTHERS) for t, c in table.items()]
CASES = [(t, {**BASE, **c, "model_type": t}) for t, c in FLAT] + [
    (t, {"model_type": t, "vocab_size": 50, "text_config": {**BASE, "model_type": t, **c}})
    for t, c in (*NESTED.items(), ("mistral3", INNER_MISTRAL4))
]
BITES = (20, 1, 1, 5)


def caches_after(config: dict[str, Any], bites: tuple[int, ...]) -> list[Any]:
    """The caches of a tiny random model of this config, after so many tokens."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    assert sum(v.size for _, v in tree_flatten(model.parameters())) < 10_000_000
    caches = make_caches(model)
    for n in bites:
        mx.eval(model(mx.array([[i % 50 for i in range(n)]]), cache=caches))
    return caches


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("kind", "config"), CASES, ids=[f"{t}-{i}" for i, (t, _) in enumerate(CASES)]
)
def test_f1_geometry_equals_nbytes_of_real_caches(kind: str, config: dict[str, Any]) -> None:
    predicted = shape_of_config(config).geometry
    caches = caches_after(config, BITES)
    assert allocated_bytes(predicted, BITES) == sum(cache.nbytes for cache in caches)
    owners = [layer for layer in predicted.layers if layer.kind is not LayerKind.SHARED]
    assert [kind_of(cache) for cache in caches] == [cached_as(layer) for layer in owners]
    assert sum(cache.nbytes for cache in caches) <= peak_bytes(predicted, sum(BITES), max(BITES))


def kind_of(cache: Any) -> LayerKind:
    """What a cache of mlx-lm is in our words."""
    kinds = {
        KVCache: LayerKind.FULL,
        RotatingKVCache: LayerKind.SLIDING,
        ChunkedKVCache: LayerKind.CHUNKED,
        ArraysCache: LayerKind.RECURRENT,
    }
    return kinds[type(cache)]


def cached_as(layer: Layer) -> LayerKind:
    """mlx-lm keeps latents in an ordinary KVCache."""
    return LayerKind.FULL if layer.kind is LayerKind.LATENT else layer.kind


def test_f9_the_remappings_are_those_of_mlx_lm() -> None:
    from mlx_lm import utils

    assert model_shape._remappings()[0] == utils.MODEL_REMAPPING
    for kind in utils.MODEL_REMAPPING:
        architecture = utils._get_classes({"model_type": kind})[0].__module__
        assert model_shape._module_name({"model_type": kind}) == architecture.rpartition(".")[2]


def test_f9_a_shape_allocates_and_computes_nothing() -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    shape = shape_of_config(
        BASE | {"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 40}
    )
    assert shape.weights is not None and shape.weights.n_bytes() > 2**30
    assert mx.get_peak_memory() - before < 2**20


def fill(cache: Any, bites: list[int], dim: int) -> Any:
    for n in bites:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        keys = mx.zeros((1, 1, n, dim), dtype=mx.float16)
        cache.update_and_fetch(keys, keys)
    return cache


def one(layer: Layer, **more: int) -> Geometry:
    return Geometry(layers=(layer,), **more)


bites_lists = st.lists(
    st.sampled_from([1, 1, 1, 2, 60, 128, 256, 300]) | st.integers(1, 700), min_size=1, max_size=40
)


@pytest.mark.mlx
@settings(max_examples=60)
@example(bites=[300, 468, 257, 255], window=256)
@given(bites=bites_lists, window=st.sampled_from([2, 64, 256, 300, 700]))
def test_f4_rows_are_those_of_every_cache_class(bites: list[int], window: int) -> None:
    full = Layer(LayerKind.FULL, 1, 64, 1, 64)
    sliding = Layer(LayerKind.SLIDING, 1, 64, 1, 64, window)
    chunked = Layer(LayerKind.CHUNKED, 1, 64, 1, 64, window)
    for layer, cache in (
        (full, KVCache()),
        (sliding, RotatingKVCache(window)),
        (chunked, ChunkedKVCache(window)),
    ):
        n_bytes = fill(cache, bites, 64).nbytes
        assert allocated_bytes(one(layer), bites) == n_bytes
        assert n_bytes <= peak_bytes(one(layer), sum(bites), max(bites))
    for bits in (4, 8):
        stored = quantized(one(full), bits)
        assert allocated_bytes(stored, bites) == fill(QuantizedKVCache(64, bits), bites, 64).nbytes


@pytest.mark.mlx
def test_f4_window_holds_w_minus_1_plus_bite_during_prefill() -> None:
    cache = RotatingKVCache(64)
    layer = Layer(LayerKind.SLIDING, 1, 8, 1, 8, 64)
    fill(cache, [200, 200], 8)
    assert cache.nbytes == (64 - 1 + 200) * one(layer).token_bytes(layer)
    assert peak_bytes(one(layer), 400, 200) == cache.nbytes
