"""What the tiny configs are made of: one superset of fields, and the fields of each family."""

from typing import Any

Config = dict[str, Any]

N_LAYERS = 4
WINDOW = 32
VOCAB = 160

SUPERSET: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": N_LAYERS,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "sliding_window": WINDOW,
    "rope_scaling": None,
    "use_qk_norm": True,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (N_LAYERS // 2)
EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
LATENT: Config = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
SPARSE: Config = {**LATENT, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 16}
YARN: Config = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DELTA: Config = {
    **EXPERTS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
KDA: Config = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
CONV: Config = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention"] * (N_LAYERS // 2),
}
GPT2: Config = {
    "n_embd": 128,
    "n_head": 4,
    "n_layer": N_LAYERS,
    "n_inner": 64,
    "n_positions": 512,
    "n_ctx": 512,
}
GRANITE: Config = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
MAMBA: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_dt_rank": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_conv_bias": True,
    "time_step_rank": 8,
    "time_step_limit": [0.001, 100.0],
}
GEMMA4: Config = {
    "layer_types": ALTERNATING,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
}
GEMMA3N: Config = {
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": VOCAB,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.0] * 6,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
LLAMA4: Config = {
    **EXPERTS,
    "num_experts_per_tok": 1,
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
}
LONGCAT: Config = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
DELTA_DENSE: Config = {key: value for key, value in DELTA.items() if key.startswith("linear")}
SLIDING_TYPES: Config = {"layer_types": ALTERNATING}
ROPE_BY_TYPE: Config = {
    "rope_parameters": {
        kind: {"rope_theta": 1e4, "rope_type": "default"}
        for kind in ("sliding_attention", "full_attention")
    }
}
LLAMA4_ROPE: Config = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    }
}


def nested(**text: Any) -> Config:
    """A wrapper whose language model has the superset and `text` as its own config."""
    return {"text_config": {**SUPERSET, **text}}
