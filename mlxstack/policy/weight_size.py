"""What the weights of a model will take, reckoned from its config before anything is downloaded.

Counts the large matrices of the common layouts (attention, gated MLP, experts, embeddings) in
the precision that `quantization` gives them; norms and biases are left out, as is what mlx-lm
does not load (vision and audio towers). Other layouts are refused rather than guessed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from mlxstack.core.errors import Unsupported
from mlxstack.core.model_info import Weights
from mlxstack.policy import kv_geometry_by_model
from mlxstack.policy.kv_geometry import Geometry, Layer, LayerKind

Config = Mapping[str, Any]

DENSE = frozenset(
    {"llama", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3"}
    | {"olmo2", "olmo3", "smollm3", "seed_oss", "glm4", "cohere2", "exaone4"}
)
MIXED = frozenset({"qwen3_moe", "gpt_oss", "mixtral", "gemma4", "gemma4_text"})
UNTIED = frozenset({"gpt_oss", "mixtral"})
KINDS = frozenset({LayerKind.FULL, LayerKind.SLIDING})
VOCABULARY = {"gemma3": 262208, "gemma3_text": 262144}
"""What mlx-lm takes where the config is silent."""


class WeightMatrix(Struct, frozen=True):
    """`n_params` numbers of all modules whose path ends with `name`."""

    name: str
    n_params: int


class WeightPrecision(Struct, frozen=True):
    """`bits` per number, and one scale per group: `n_scales` of them, floats or bytes."""

    bits: int
    group_size: int
    mode: str = "affine"


def estimate(config: Config) -> Weights:
    """Bytes of the weights as mlx-lm would hold them. Raises Unsupported for other layouts."""
    kind = kv_geometry_by_model.model_type(config)
    text = _text(config, kind)
    if kind not in DENSE | MIXED or text.get("hidden_size_per_layer_input"):
        raise Unsupported(
            f"the weights of type '{kind}' are not estimated; download the model, or give its "
            "folder, and they are measured",
            "model_type",
        )
    geometry = kv_geometry_by_model.geometry(config)
    try:
        parts = [_stored(one, config) for one in _matrices(kind, text, geometry)]
    except (KeyError, TypeError) as missing:
        raise Unsupported(
            f"config.json lacks what an estimate of the weights needs ({missing})", "config.json"
        ) from None
    return Weights(
        packed=sum(part.packed for part in parts),
        n_half=sum(part.n_half for part in parts),
        n_single=sum(part.n_single for part in parts),
    )


def _text(config: Config, kind: str) -> dict[str, Any]:
    merged = {**config, **(config.get("text_config") or {})}
    given = {key: value for key, value in merged.items() if value is not None}
    return {
        "vocab_size": VOCABULARY.get(kind),
        **kv_geometry_by_model.DEFAULTS.get(kind, {}),
        **given,
    }


def _matrices(kind: str, text: Config, geometry: Geometry) -> Iterator[WeightMatrix]:
    hidden = int(text["hidden_size"])
    yield WeightMatrix("embed_tokens", int(text["vocab_size"]) * hidden)
    if not text.get("tie_word_embeddings", kind not in UNTIED):
        yield WeightMatrix("lm_head", int(text["vocab_size"]) * hidden)
    for layer in geometry.layers:
        if layer.kind not in KINDS:
            raise Unsupported(f"layers of kind {layer.kind} are not estimated", "model_type")
        yield from _attention(text, layer, hidden)
        yield from _mlp(kind, text, hidden)


def _attention(text: Config, layer: Layer, hidden: int) -> Iterator[WeightMatrix]:
    heads = int(text["num_attention_heads"])
    is_one = bool(text.get("attention_k_eq_v")) and layer.kind is LayerKind.FULL
    yield WeightMatrix("q_proj", hidden * heads * layer.k_dim)
    yield WeightMatrix("k_proj", hidden * layer.k_heads * layer.k_dim)
    yield WeightMatrix("v_proj", 0 if is_one else hidden * layer.v_heads * layer.v_dim)
    yield WeightMatrix("o_proj", hidden * heads * layer.v_dim)


def _mlp(kind: str, text: Config, hidden: int) -> Iterator[WeightMatrix]:
    n_experts = _n_experts(text) if kind in MIXED else 0
    inner = int(text["intermediate_size"])
    if not n_experts or kind.startswith("gemma4"):
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            yield WeightMatrix(name, hidden * inner)
    if n_experts:
        inner = int(text.get("moe_intermediate_size") or inner)
        yield WeightMatrix("experts.gate_proj", 3 * n_experts * hidden * inner)
        yield WeightMatrix("router.proj", n_experts * hidden)


def _n_experts(text: Config) -> int:
    return int(text.get("num_experts") or text.get("num_local_experts") or 0)


def _stored(matrix: WeightMatrix, config: Config) -> Weights:
    precision = _precision(matrix.name, config)
    n = matrix.n_params
    if precision is None:
        is_single = kv_geometry_by_model.geometry(config).element_bytes == 4
        return Weights(n_single=n) if is_single else Weights(n_half=n)
    packed = n * precision.bits // 8
    n_groups = n // precision.group_size
    if precision.mode == "affine":
        return Weights(packed=packed, n_half=2 * n_groups)
    return Weights(packed=packed + n_groups)


def _precision(name: str, config: Config) -> WeightPrecision | None:
    """Of `quantization` and its exceptions by path, as mlx-lm writes them; None: not quantised."""
    table = config.get("quantization")
    if not isinstance(table, Mapping):
        return None
    found = next((value for path, value in table.items() if path.endswith(name)), table)
    if not isinstance(found, Mapping):
        return None
    default_mode = table.get("mode", "affine") if found is table else "affine"
    return WeightPrecision(
        bits=int(found.get("bits", 4)),
        group_size=int(found.get("group_size", 64)),
        mode=str(found.get("mode", default_mode)),
    )
