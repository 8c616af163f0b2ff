"""Tiny random models that see, built when a test needs them.

A folder as from a hub: config.json with `vision_config`, weights of the text model and of the tower
in one file, preprocessor_config.json, and the demo tokenizer with the image tokens of the family.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxstack.features.vision.images.checkpoint import TOWER
from mlxstack.features.vision.images.pixtral import PLACEHOLDER
from tests import models
from tests.models import TABLE

VOCAB = models.VOCAB + 8
"""The demo vocabulary and the image tokens of a family."""

QWEN_VISION = TABLE["qwen_vision"]
QWEN_TOKENS = TABLE["qwen_tokens"]
QWEN3_VL = TABLE["qwen3_vl"]
QWEN3_5 = TABLE["qwen3_5"]
PIXTRAL_TOKENS = TABLE["pixtral_tokens"]
MISTRAL3 = TABLE["mistral3"]
GEMMA3_TOKENS = TABLE["gemma3_tokens"]
GEMMA3 = TABLE["gemma3"]
GEMMA4_TOKENS = TABLE["gemma4_tokens"]
GEMMA4 = TABLE["gemma4"]
GEMMA4_E4B = TABLE["gemma4_e4b"]

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "mistral3": MISTRAL3,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4_e4b": GEMMA4_E4B,
}


def build(
    folder: Path,
    kind: str,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write the model `kind` of CONFIGS into `folder`; the same seed gives the same bytes.

    For Qwen, an image of 64 x 64 pixels has 4 features, and one of 128 x 64 has 8. `vision`
    replaces `vision_config`.
    """
    config = {**CONFIGS[kind]}
    family = FAMILIES[CONFIGS[kind]["model_type"]]
    config["vision_config"] = vision or config["vision_config"]
    config.update({key: models.VOCAB + i for i, key in enumerate(family.tokens)})
    models.write(folder, config, seed, dtype)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    tower = family.tower(config["vision_config"], seed)
    weights.update({name: array.astype(dtype) for name, array in tower.items()})
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor))
    _add_tokens(folder, list(family.tokens.values()))
    _let_template_see(folder, family.mark)
    return folder


def qwen_tower(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random weights of Qwen's tower, with the patch layout of MLX."""
    n = config["hidden_size"]
    wide = config["intermediate_size"]
    out = config["out_hidden_size"]
    merged = n * config["spatial_merge_size"] ** 2
    patch = config["patch_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (n, config["temporal_patch_size"], patch, patch, 3),
        "patch_embed.proj.bias": (n,),
        "pos_embed.weight": (config["num_position_embeddings"], n),
    }
    for i in range(config["depth"]):
        shapes |= _linear(f"blocks.{i}.attn.qkv", n, 3 * n) | _linear(f"blocks.{i}.attn.proj", n, n)
        shapes |= _linear(f"blocks.{i}.mlp.linear_fc1", n, wide)
        shapes |= _linear(f"blocks.{i}.mlp.linear_fc2", wide, n)
        shapes |= _norm(f"blocks.{i}.norm1", n) | _norm(f"blocks.{i}.norm2", n)
    mergers = {"merger": n}
    mergers |= {
        f"deepstack_merger_list.{i}": merged for i in range(len(config["deepstack_visual_indexes"]))
    }
    for name, norm in mergers.items():
        shapes |= _norm(f"{name}.norm", norm)
        shapes |= _linear(f"{name}.linear_fc1", merged, merged)
        shapes |= _linear(f"{name}.linear_fc2", merged, out)
    return {f"vision_tower.{name}": array for name, array in _random(shapes, seed).items()}


def pixtral_tower(config: dict[str, Any], seed: int = 0, dim: int = 64) -> dict[str, mx.array]:
    """Random weights of Pixtral's tower and of a projector to `dim` dimensions."""
    n = config["hidden_size"]
    wide = config["intermediate_size"]
    patch = config["patch_size"]
    tower = "vision_tower"
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.patch_conv.weight": (n, patch, patch, 3),
        f"{tower}.ln_pre.weight": (n,),
    }
    for i in range(config["num_hidden_layers"]):
        block = f"{tower}.transformer.layers.{i}"
        shapes |= {f"{block}.attention.{part}_proj.weight": (n, n) for part in "qkvo"}
        shapes |= {f"{block}.feed_forward.{part}_proj.weight": (wide, n) for part in ("gate", "up")}
        shapes[f"{block}.feed_forward.down_proj.weight"] = (n, wide)
        shapes |= {f"{block}.{part}_norm.weight": (n,) for part in ("attention", "ffn")}
    projector = "multi_modal_projector"
    shapes |= {
        f"{projector}.norm.weight": (n,),
        f"{projector}.patch_merger.merging_layer.weight": (n, 4 * n),
        f"{projector}.linear_1.weight": (dim, n),
        f"{projector}.linear_2.weight": (dim, dim),
    }
    return _random(shapes, seed)


def beside(folder: Path, dim: int) -> dict[str, Any]:
    """Write a tower beside a Llama with the demo tokenizer; what its config.json says of it."""
    vision = MISTRAL3["vision_config"]
    mx.save_safetensors(str(folder / TOWER), pixtral_tower(vision, dim=dim))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 112}}))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {"vision_config": vision, "image_token_id": vocabulary[PLACEHOLDER]}


def siglip_tower(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random weights of SigLIP's tower and of Gemma's projector to 64 dimensions."""
    n = config["hidden_size"]
    wide = config["intermediate_size"]
    patch = config["patch_size"]
    tower = "vision_tower.vision_model"
    projector = "multi_modal_projector"
    embeddings = f"{tower}.embeddings"
    shapes: dict[str, tuple[int, ...]] = {
        f"{embeddings}.patch_embedding.weight": (n, patch, patch, 3),
        f"{embeddings}.patch_embedding.bias": (n,),
        f"{embeddings}.position_embedding.weight": ((config["image_size"] // patch) ** 2, n),
        **_norm(f"{tower}.post_layernorm", n),
        f"{projector}.mm_soft_emb_norm.weight": (n,),
        f"{projector}.mm_input_projection_weight": (n, 64),
    }
    for i in range(config["num_hidden_layers"]):
        block = f"{tower}.encoder.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{block}.self_attn.{part}", n, n)
        shapes |= _linear(f"{block}.mlp.fc1", n, wide) | _linear(f"{block}.mlp.fc2", wide, n)
        shapes |= _norm(f"{block}.layer_norm1", n) | _norm(f"{block}.layer_norm2", n)
    return _random(shapes, seed)


def gemma4_tower(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random weights of Gemma 4's tower and of its projector to 64 dimensions."""
    n = config["hidden_size"]
    wide = config["intermediate_size"]
    head = config["head_dim"]
    tower = "vision_tower"
    sizes = {
        "self_attn.q_proj": (config["num_attention_heads"] * head, n),
        "self_attn.k_proj": (config["num_key_value_heads"] * head, n),
        "self_attn.v_proj": (config["num_key_value_heads"] * head, n),
        "self_attn.o_proj": (n, config["num_attention_heads"] * head),
        "mlp.gate_proj": (wide, n),
        "mlp.up_proj": (wide, n),
        "mlp.down_proj": (n, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.patch_embedder.input_proj.weight": (n, 3 * config["patch_size"] ** 2),
        f"{tower}.patch_embedder.position_embedding_table": (
            2,
            config["position_embedding_size"],
            n,
        ),
        "embed_vision.embedding_projection.weight": (64, n),
    }
    bounds = {}
    for i in range(config["num_hidden_layers"]):
        block = f"{tower}.encoder.layers.{i}"
        shapes |= {f"{block}.{name}.linear.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{block}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{block}.{place}_layernorm.weight"] = (n,)
        if config.get("use_clipped_linears"):
            for name in sizes:
                bounds |= {
                    f"{block}.{name}.{place}_max": mx.array(0.9) for place in ("input", "output")
                }
                bounds |= {
                    f"{block}.{name}.{place}_min": mx.array(-1.1) for place in ("input", "output")
                }
    if config.get("standardize"):
        shapes |= {f"{tower}.std_scale": (n,), f"{tower}.std_bias": (n,)}
    weights = _random(shapes, seed) | bounds
    # As large as the patches, so that positions count.
    weights[f"{tower}.patch_embedder.position_embedding_table"] *= 32
    return weights


class VisionKind(NamedTuple):
    """Files of a family beside those of a text model."""

    tokens: dict[str, str]
    tower: Callable[[dict[str, Any], int], dict[str, mx.array]]
    processor: dict[str, Any]
    mark: str


QWEN = VisionKind(
    QWEN_TOKENS,
    qwen_tower,
    {"size": {"shortest_edge": 64 * 64, "longest_edge": 4096 * 4096}},
    "<|vision_start|><|image_pad|><|vision_end|>",
)
FAMILIES = {
    "qwen3_vl": QWEN,
    "qwen3_5": QWEN,
    "mistral3": VisionKind(
        PIXTRAL_TOKENS, pixtral_tower, {"size": {"longest_edge": 1540}}, "[IMG]"
    ),
    "gemma3": VisionKind(
        GEMMA3_TOKENS, siglip_tower, {"size": {"height": 112, "width": 112}}, "<start_of_image>"
    ),
    "gemma4": VisionKind(GEMMA4_TOKENS, gemma4_tower, {"max_soft_tokens": 24}, "<|image|>"),
}
"""By `model_type`."""


def _linear(name: str, wide: int, out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, wide), f"{name}.bias": (out,)}


def _norm(name: str, n: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (n,), f"{name}.bias": (n,)}


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, mx.array]:
    mx.random.seed(seed + 1)
    weights = {}
    for name, shape in shapes.items():
        fan_in = 100 if len(shape) < 2 else mx.zeros(shape[1:]).size
        weights[name] = mx.random.normal(shape) / fan_in**0.5
        if len(shape) == 1 and not name.endswith("bias"):
            weights[name] = weights[name] + 1
    return weights


def _add_tokens(folder: Path, texts: list[str]) -> None:
    """Append special tokens to the demo tokenizer, whose own image tokens get other names."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text().replace('"[IMG', '"[DEMO_IMG'))
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": models.VOCAB + i, "content": text}
        for i, text in enumerate(texts)
    ]
    path.write_text(json.dumps(tokenizer))


def _let_template_see(folder: Path, mark: str) -> None:
    """Make the demo chat template write `mark` for each part of type `image`."""
    path = folder / "chat_template.jinja"
    text = "{%- elif part.text is defined -%}"
    image = "{%- elif part.type == 'image' or part.image_url is defined -%}{{- '" + mark + "' -}}"
    template = path.read_text()
    assert template.count(text) == 1
    path.write_text(template.replace(text, image + text))
