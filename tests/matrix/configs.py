"""A tiny config for every row of the matrix: every model type, and variants of some."""

import copy

from tests.matrix.families import (
    ALTERNATING,
    LATENT,
    LLAMA4_ROPE,
    SLIDING_TYPES,
    SUPERSET,
    Config,
    nested,
)
from tests.matrix.fields import ADDED

# Configs of a type that is in the table already, for a kind of layer that its first one lacks.
VARIANTS: dict[str, tuple[str, Config]] = {
    "llama, sliding window": ("llama", SLIDING_TYPES),
    "llama, 4-bit weights": ("llama", {"quantization_bits": 4}),
    "qwen3_moe, 4-bit weights": ("qwen3_moe", {"quantization_bits": 4}),
    "qwen3_next, 4-bit weights": ("qwen3_next", {"quantization_bits": 4}),
    "deepseek_v3, 4-bit weights": ("deepseek_v3", {"quantization_bits": 4}),
    "mistral3, ministral3 inside": (
        "mistral3",
        nested(**SLIDING_TYPES, **LLAMA4_ROPE, model_type="ministral3"),
    ),
    "mistral3, mistral4 inside": (
        "mistral3",
        nested(**LATENT, **LLAMA4_ROPE, model_type="mistral4"),
    ),
    "gemma4_text, shared KV": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ALTERNATING + ALTERNATING[:2],
            "num_kv_shared_layers": 2,
        },
    ),
}


def outer_type(name: str) -> str:
    """The `model_type` of a row of the table: itself, or the type it is a variant of."""
    return VARIANTS[name][0] if name in VARIANTS else name


def config_of(name: str) -> Config:
    """A config.json for a tiny model of this type or variant."""
    model_type, more = VARIANTS.get(name, (name, {}))
    config = copy.deepcopy({**SUPERSET, **ADDED.get(model_type, {}), **more})
    config["model_type"] = model_type
    if "text_config" in config:
        config["text_config"].setdefault("model_type", model_type)
    return config
