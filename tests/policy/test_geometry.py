"""The numbers of published models, and what the planner refuses."""

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.errors import Unsupported
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.policy.memory.capacity import (
    Division,
    Geometry,
    Layer,
    LayerKind,
    divided,
    quantized,
    stages,
    workspace_bytes,
)
from tests.policy.allocation import peak_bytes

YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}

pytestmark = pytest.mark.mlx

KIB = 1024
MIB = 1024 * 1024

REST: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
}
"""Fields that mlx-lm needs, and that decide nothing here."""


def geometry(config: dict[str, Any]) -> Geometry:
    """Of the model that mlx-lm builds from this config."""
    text = config.get("text_config")
    whole = {**config, "text_config": {**REST, **text}} if text else {**REST, **config}
    return shape_of_config(whole).geometry


GEMMA3_12B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
QWEN25_14B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
}
GEMMA4_26B = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 2816,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    },
}


@pytest.mark.parametrize(
    ("config", "growth_kib", "window_mib", "total_mib"),
    [
        (GEMMA3_12B, 64, 320, 576),
        (GPT_OSS_20B, 24, 3, 99),
        (QWEN25_14B, 192, 0, 768),
        (LLAMA31_8B, 128, 0, 512),
    ],
)
def test_f3_growth_window_and_total_at_4096(
    config: dict[str, Any], growth_kib: int, window_mib: int, total_mib: int
) -> None:
    spec = geometry(config)
    assert spec.growth == growth_kib * KIB
    assert spec.state_bytes(4096) == window_mib * MIB
    assert spec.n_bytes(4096) == total_mib * MIB


def test_f1_gemma4_wide_full_layers_and_k_equal_v_cost_both() -> None:
    spec = geometry(GEMMA4_26B)
    assert spec.growth == 20 * KIB
    assert quantized(spec, 8).growth == 10.625 * KIB
    assert spec.state_bytes(5000) == 25 * 8 * KIB * 1024
    assert len(spec.full_layers) == 5


def test_f2_gemma3_is_full_at_every_sixth_layer() -> None:
    assert geometry(GEMMA3_12B).full_layers == (5, 11, 17, 23, 29, 35, 41, 47)


def test_f2_gpt_oss_slides_first_with_and_without_the_list() -> None:
    unlisted = {k: v for k, v in GPT_OSS_20B.items() if k != "layer_types"}
    assert geometry(GPT_OSS_20B) == geometry(unlisted)
    assert geometry(unlisted).full_layers == tuple(range(1, 24, 2))


def test_kv_beside_sinks_is_not_quantized() -> None:
    with pytest.raises(Unsupported, match="no quantized attention with sinks"):
        quantized(geometry(GPT_OSS_20B), 8)


@pytest.mark.parametrize(("bits", "ratio"), [(16, 1.0), (8, 0.53125), (4, 0.28125)])
def test_f1_kv_bits_include_scales_and_biases(bits: int, ratio: float) -> None:
    spec = geometry(LLAMA31_8B)
    assert quantized(spec, bits).n_bytes(1000) == spec.n_bytes(1000) * ratio


def test_f1_windows_are_not_quantized() -> None:
    spec = quantized(geometry(GEMMA3_12B), 8)
    assert spec.state_bytes(4096) == 320 * MIB
    assert spec.growth == 64 * KIB * 0.53125


def test_f1_quantizing_refuses_what_mlx_cannot_hold() -> None:
    odd = geometry(LLAMA31_8B | {"head_dim": 80})
    with pytest.raises(Unsupported, match="80 numbers cannot be quantized in groups of 64"):
        quantized(odd, 8)
    with pytest.raises(Unsupported, match="use 16, 8 or 4"):
        quantized(odd, 6)
    assert quantized(odd, 16) == odd


def test_f1_missing_head_dim_is_computed_and_given_one_wins() -> None:
    assert geometry(LLAMA31_8B).layers[0].k_dim == 128
    assert geometry(LLAMA31_8B | {"head_dim": 64}).growth == 64 * KIB
    assert geometry(LLAMA31_8B | {"head_dim": None}).growth == 128 * KIB
    missing = {k: v for k, v in LLAMA31_8B.items() if k != "num_key_value_heads"}
    assert geometry(missing).layers[0].k_heads == 32


def test_f1_shared_layers_own_nothing() -> None:
    text = GEMMA4_26B["text_config"] | {"num_kv_shared_layers": 6}
    spec = geometry({"model_type": "gemma4", "text_config": text})
    assert [layer.kind for layer in spec.layers[24:]] == [LayerKind.SHARED] * 6
    assert spec.growth == 16 * KIB


def test_f1_latent_is_one_vector_and_k_differs_from_v() -> None:
    config = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    latent = geometry({"model_type": "deepseek_v3"} | config)
    assert latent.growth == 27 * (512 + 64) * 2
    assert latent.is_sliceable
    heads = {
        "num_attention_heads": 16,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_scaling": YARN,
    }
    expanded = geometry({"model_type": "deepseek_v2"} | config | heads)
    assert expanded.growth == 27 * 16 * (192 + 128) * 2
    assert quantized(latent, 8).growth == latent.growth


LACKING = r"of type '.*' are not in mlx-lm \S+( and|; mlx-vlm)"


@pytest.mark.parametrize(
    ("kind", "message"),
    [("rwkv7x", LACKING), ("never_heard_of", LACKING), ("", "config.json lacks 'model_type'")],
)
def test_f9_types_that_mlx_lm_lacks_are_refused(kind: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        geometry(LLAMA31_8B | {"model_type": kind})


def test_f9_a_purely_recurrent_model_has_a_state_and_no_growth() -> None:
    config = {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    }
    spec = geometry(config)
    assert [layer.kind for layer in spec.layers] == [LayerKind.RECURRENT] * 3
    assert spec.growth == 0
    assert spec.n_bytes(10) == spec.n_bytes(100_000) > 0


def test_f9_hybrids_are_marked_and_their_state_is_constant() -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    spec = geometry(config)
    assert not spec.is_sliceable
    assert spec.full_layers == tuple(range(3, 48, 4))
    assert spec.state_bytes(10) == spec.state_bytes(100_000) == 36 * (3 * 8192 * 2 + 32 * 16384 * 4)
    assert spec.state_bytes(0) == 0


def test_f9_a_missing_number_is_named() -> None:
    broken = {k: v for k, v in QWEN25_14B.items() if k != "num_hidden_layers"}
    with pytest.raises(Unsupported, match=r"type 'qwen2' .* 'num_hidden_layers'"):
        geometry(broken)


def test_float32_weights_double_the_kv() -> None:
    assert geometry(LLAMA31_8B | {"torch_dtype": "float32"}).growth == 256 * KIB
    assert geometry(LLAMA31_8B | {"dtype": "float16"}).growth == 128 * KIB


def test_a6_workspace_grows_with_the_bite_and_holds_the_logits() -> None:
    shape = shape_of_config(REST | LLAMA31_8B)
    small = workspace_bytes(shape, 512)
    big = workspace_bytes(shape, 2048)
    assert small < big < 1024 * MIB
    assert workspace_bytes(shape, 512, 4) - small == 3 * 128256 * 4


def test_float32_activations_are_counted_once() -> None:
    half, single = (
        shape_of_config(REST | LLAMA31_8B | {"torch_dtype": kind})
        for kind in ("float16", "float32")
    )
    wide = workspace_bytes(single, 512)
    assert workspace_bytes(single, 512, half_bytes=4) == wide > workspace_bytes(half, 512)
    assert workspace_bytes(half, 512, half_bytes=4) == wide


def test_the_workspace_holds_the_table_of_grammars_for_each_word() -> None:
    """At least what llguidance took for Gemma's 262,144 words: 131 MiB."""
    shape = shape_of_config(REST | LLAMA31_8B)
    larger = replace(shape, n_vocab=shape.n_vocab + 262_144)
    logits = 2 * 262_144 * 4
    assert workspace_bytes(larger, 512) - workspace_bytes(shape, 512) - logits >= 131 * MIB


@functools.cache
def sliding(window: int) -> Geometry:
    return geometry(GPT_OSS_20B | {"sliding_window": window})


@given(n=st.integers(0, 200_000), bite=st.integers(1, 4096), window=st.sampled_from((1, 128, 5000)))
def test_f4_used_never_exceeds_peak(n: int, bite: int, window: int) -> None:
    spec = sliding(window)
    assert spec.n_bytes(n) <= peak_bytes(spec, n, bite)
    assert spec.token_bytes(Layer(LayerKind.SHARED)) == 0
    assert spec.state_bytes(n) == 12 * min(n, window) * 2048


def test_stages_divide_the_layers_and_rank_0_has_the_last_ones() -> None:
    assert stages("rfrfr", 2) == [range(2, 5), range(2)]
    assert stages("rf" * 12, 3) == [range(16, 24), range(8, 16), range(8)]
    assert stages("rfrfr", 1) == [range(5)]


@pytest.mark.parametrize(("kinds", "n_ranks"), [("rrrf", 2), ("rrrfrrrf", 3), ("ff", 3)])
def test_a_rank_without_a_layer_of_every_kind_is_refused(kinds: str, n_ranks: int) -> None:
    with pytest.raises(Unsupported, match="use fewer machines"):
        stages(kinds, n_ranks)


def test_a_pipeline_is_as_large_as_its_largest_stage() -> None:
    full = Layer(LayerKind.FULL, 2, 64, 2, 64)
    state = Layer(LayerKind.RECURRENT, state_bytes=1000)
    whole = Geometry((state, full, state, full, full))
    stage = divided(whole, 2, Division.PIPELINE)
    assert stage.layers == whole.layers[2:]
    part = divided(whole, 2, Division.TENSOR)
    assert part.growth * 2 == whole.growth < stage.growth * 2
    assert part.state_bytes(1) * 2 == whole.state_bytes(1)
