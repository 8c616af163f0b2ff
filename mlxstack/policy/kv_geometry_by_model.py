"""From a model's config.json to the geometry of the caches that mlx-lm makes for it.

Follows `make_cache` and the attention of each file in `mlx_lm/models` (0.32), not the intent of
the config: mlx-lm keeps full caches for Gemma 2 and for Mistral's window, for example. A type
that is not listed here is refused: a wrong number is worse than none.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mlxstack.core.errors import Unsupported
from mlxstack.policy.kv_geometry import PLAIN_BITS, Geometry, Layer, LayerKind

FUSED_HEAD_DIMS = frozenset({64, 80, 128})
"""Head dims for which every MLX of 0.32 computes attention on Metal without storing scores."""

SCORE_COPIES = 2
"""Scores and their softmax are alive at once where attention is not fused."""

MAX_SCORE_BYTES = 2**30
"""Bytes of attention scores of one prefill chunk; longer contexts get shorter chunks."""

Config = Mapping[str, Any]
Layers = tuple[Layer, ...]


def geometry(config: Config) -> Geometry:
    """The caches of the model that `config` (a parsed config.json) describes, unquantised.

    Raises Unsupported when the type is unknown to the planner or a needed number is missing.
    """
    kind, text = model_type(config), _text(config)
    if kind not in RULES:
        raise Unsupported(
            f"the planner does not know how models of type '{kind}' keep their KV, so it gives "
            "no number; load the model and measure",
            "model_type",
        )
    try:
        layers = RULES[kind](text)
    except KeyError as missing:
        raise Unsupported(
            f"config.json of type '{kind}' lacks {missing}, which the KV geometry needs",
            "config.json",
        ) from None
    return Geometry(layers, _element_bytes(text), has_sinks=kind in SINKS)


def model_type(config: Config) -> str:
    """The type whose mlx-lm file serves this config."""
    outer = str(config.get("model_type", ""))
    if outer in ("mistral3", "llava"):
        inner = str(config.get("text_config", {}).get("model_type", ""))
        return inner if inner in ("ministral3", "mistral4") else "llama"
    return ALIASES.get(outer, outer)


def workspace_bytes(config: Config, chunk: int, n_slots: int = 1) -> int:
    """A generous estimate of activations: the widest layer over one bite, and all logits.

    Measure after load where you can; this is for deciding before.
    """
    text = _text(config)
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    inner = text.get("intermediate_size") or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else inner
    per_token = 6 * hidden + 3 * inner + 2 * heads * _dim(text)
    logits = text.get("vocab_size", 0) * 4 * (n_slots + 1)
    return int(per_token * chunk * _element_bytes(text) + logits)


def score_bytes(config: Config, bits: int) -> int:
    """Bytes of attention scores per query token and context token on a GPU; 0 when fused.

    `bits` is the KV precision: attention over quantized KV is never fused.
    """
    text = _text(config)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
    each = heads * _element_bytes(text) * SCORE_COPIES
    try:
        layers = geometry(config).layers
    except Unsupported:
        return each
    is_fused = all(
        bits == PLAIN_BITS and layer.k_dim == layer.v_dim and layer.k_dim in FUSED_HEAD_DIMS
        for layer in layers
        if layer.kind is LayerKind.FULL
    )
    return 0 if is_fused and all(one.kind is not LayerKind.LATENT for one in layers) else each


def peak_score_bytes(config: Config, bits: int, chunk: int, n_ctx: int) -> int:
    """The most bytes of attention scores in a prefill of `n_ctx` tokens on a GPU."""
    return min(MAX_SCORE_BYTES, score_bytes(config, bits) * chunk * n_ctx)


def _text(config: Config) -> dict[str, Any]:
    kind = model_type(config)
    inner = config.get("text_config") or {}
    given = {key: value for key, value in {**config, **inner}.items() if value is not None}
    return {**DEFAULTS.get(kind, {}), **given}


def _element_bytes(text: Config) -> int:
    dtype = str(text.get("torch_dtype", text.get("dtype", "bfloat16")))
    return 4 if dtype.endswith("float32") else 2


def _n_layers(text: Config) -> int:
    return int(text["num_hidden_layers"])


def _heads(text: Config) -> int:
    return int(text.get("num_key_value_heads", text["num_attention_heads"]))


def _dim(text: Config) -> int:
    return int(text.get("head_dim") or _derived_dim(text))


def _derived_dim(text: Config) -> int:
    return int(text["hidden_size"]) // int(text["num_attention_heads"])


def _kv(heads: int, dim: int, window: int = 0) -> Layer:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    return Layer(kind, heads, dim, heads, dim, window)


def _plain(text: Config) -> Layers:
    return (_kv(_heads(text), _dim(text)),) * _n_layers(text)


def _derived(text: Config) -> Layers:
    """These files compute the dim from the hidden size whatever the config says."""
    return (_kv(_heads(text), _derived_dim(text)),) * _n_layers(text)


def _looped(text: Config) -> Layers:
    return _plain(text) * int(text.get("num_loops", 1))


def _gpt2(text: Config) -> Layers:
    heads, dim = int(text["n_head"]), int(text["n_embd"]) // int(text["n_head"])
    return (_kv(1 if text.get("multi_query") else heads, dim),) * int(text["n_layer"])


def _by_types(text: Config) -> Layers:
    """Full where `layer_types` says so, sliding elsewhere; all full without the list."""
    types = text.get("layer_types") or ["full_attention"] * _n_layers(text)
    return _typed(text, types)


def _by_pattern(text: Config) -> Layers:
    """Every n-th layer full: 5, 11, ... for the 6 of Gemma 3. mlx-lm ignores `layer_types`."""
    return _typed(text, _pattern(text, int(text["sliding_window_pattern"])))


def _alternating(text: Config) -> Layers:
    """GPT-OSS: layer 0 slides."""
    return _typed(text, text.get("layer_types") or _pattern(text, 2))


def _every_fourth(text: Config) -> Layers:
    return _typed(text, text.get("layer_types") or _pattern(text, 4))


def _letters(text: Config) -> Layers:
    """EXAONE 4: a string such as LLLG, or nothing for full attention only."""
    letters = text.get("sliding_window_pattern") or "G"
    types = [letters[i % len(letters)] for i in range(_n_layers(text))]
    return _typed(text, ["full_attention" if t != "L" else "sliding_attention" for t in types])


def _pattern(text: Config, every: int) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return [kinds[i % every == every - 1] for i in range(_n_layers(text))]


def _typed(text: Config, types: list[str]) -> Layers:
    full = _kv(_heads(text), _dim(text))
    if all(t == "full_attention" for t in types):
        return (full,) * len(types)
    sliding = _kv(_heads(text), _dim(text), int(text["sliding_window"]))
    return tuple(full if t == "full_attention" else sliding for t in types)


def _gemma3n(text: Config) -> Layers:
    own = _n_layers(text) - int(text["num_kv_shared_layers"])
    return _typed(text, text["layer_types"])[:own] + (Layer(LayerKind.SHARED),) * (
        _n_layers(text) - own
    )


def _gemma4(text: Config) -> Layers:
    """Full layers may have their own heads and dim; K = V shares weights, not the cache."""
    types = text.get("layer_types") or _pattern(text, int(text["sliding_window_pattern"]))
    wide = text["num_global_key_value_heads"] if text["attention_k_eq_v"] else 0
    full = _kv(int(wide or _heads(text)), int(text["global_head_dim"] or _dim(text)))
    sliding = _kv(_heads(text), _dim(text), int(text["sliding_window"]))
    own = _n_layers(text) - int(text["num_kv_shared_layers"])
    layers = tuple(full if t == "full_attention" else sliding for t in types[:own])
    return layers + (Layer(LayerKind.SHARED),) * (_n_layers(text) - own)


def _llama4(text: Config) -> Layers:
    heads, dim, chunk = _heads(text), _dim(text), int(text["attention_chunk_size"])
    chunked = Layer(LayerKind.CHUNKED, heads, dim, heads, dim, chunk)
    return tuple(_kv(heads, dim) if i % 4 == 3 else chunked for i in range(_n_layers(text)))


def _latent(text: Config) -> Layers:
    """MLA as mlx-lm caches it: the latent, and the rotary part of the key."""
    rank, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    return (Layer(LayerKind.LATENT, 1, rank, 1, rope),) * _n_layers(text)


def _expanded(text: Config) -> Layers:
    """MLA whose file caches the expanded keys and values: K is wider than V."""
    heads = int(text["num_attention_heads"])
    k_dim = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"])
    return (Layer(LayerKind.FULL, heads, k_dim, heads, int(text["v_head_dim"])),) * _n_layers(text)


def _delta_net(text: Config) -> Layers:
    """Qwen3-Next and 3.5: three gated delta nets (fp32 state), then one full layer."""
    k_heads, v_heads = int(text["linear_num_key_heads"]), int(text["linear_num_value_heads"])
    k_dim, v_dim = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
    conv = (int(text["linear_conv_kernel_dim"]) - 1) * (2 * k_heads * k_dim + v_heads * v_dim)
    state = conv * _element_bytes(text) + v_heads * v_dim * k_dim * 4
    recurrent = Layer(LayerKind.RECURRENT, state_bytes=state)
    every = int(text["full_attention_interval"])
    full = _kv(_heads(text), _dim(text))
    return tuple(full if i % every == every - 1 else recurrent for i in range(_n_layers(text)))


def _short_conv(text: Config) -> Layers:
    """LFM2: full attention at `full_attn_idxs` or by `layer_types`, short convolutions else."""
    types = text.get("layer_types", ())
    full_at = text.get("full_attn_idxs") or [
        i for i, kind in enumerate(types) if kind == "full_attention"
    ]
    n_keep = int(text["conv_L_cache"]) - 1
    state = n_keep * int(text["hidden_size"]) * _element_bytes(text)
    conv = Layer(LayerKind.RECURRENT, state_bytes=state)
    full = _kv(_heads(text), _derived_dim(text))
    return tuple(full if i in full_at else conv for i in range(_n_layers(text)))


ALIASES = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "kimi_k2": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "minimax_m2": "minimax",
    "gemma4_unified": "gemma4",
    "qwen2_5_vl": "qwen2_vl",
}

GEMMA4_DEFAULTS = {
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "attention_k_eq_v": False,
}
GEMMA3_DEFAULTS = {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
DELTA_DEFAULTS = {"full_attention_interval": 4}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA3_DEFAULTS | {"num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma3_text": GEMMA3_DEFAULTS | {"num_attention_heads": 4, "num_key_value_heads": 1},
    "gemma4": GEMMA4_DEFAULTS,
    "gemma4_text": GEMMA4_DEFAULTS,
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen3_next": DELTA_DEFAULTS,
    "qwen3_5": DELTA_DEFAULTS,
    "qwen3_5_moe": DELTA_DEFAULTS,
}

GROUPS: dict[Callable[[Config], Layers], str] = {
    _plain: "dots1 ernie4_5 ernie4_5_moe exaone gemma gemma2 glm glm4 glm4_moe "
    "hunyuan_v1_dense nemotron qwen3 qwen3_moe qwen3_vl qwen3_vl_moe olmo2 olmoe "
    "seed_oss solar_open telechat3 minimax",
    _derived: "Klear apertus bailing_moe cohere deepseek granite granitemoe helium internlm2 "
    "internlm3 mimo mixtral nanochat phi phi3 phimoe qwen2 qwen2_moe qwen2_vl stablelm starcoder2",
    _looped: "nanbeige",
    _gpt2: "gpt2 gpt_bigcode",
    _by_types: "llama ministral3 smollm3 afmoe exaone_moe laguna mellum muse_glimmer",
    _by_pattern: "gemma3 gemma3_text cohere2",
    _alternating: "gpt_oss",
    _every_fourth: "olmo3",
    _letters: "exaone4",
    _gemma3n: "gemma3n",
    _gemma4: "gemma4 gemma4_text",
    _llama4: "llama4",
    _latent: "deepseek_v3 glm4_moe_lite kimi_k25 kimi_vl mistral4",
    _expanded: "deepseek_v2 youtu_llm",
    _delta_net: "qwen3_next qwen3_5 qwen3_5_moe",
    _short_conv: "lfm2 lfm2_moe",
}

SINKS = frozenset({"gpt_oss"})
"""Their attention has a sink beside the keys."""

RULES = {name: rule for rule, names in GROUPS.items() for name in names.split()}
