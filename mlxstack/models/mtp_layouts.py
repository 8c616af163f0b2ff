"""Tensor names of MTP heads and n-gram tables, by type of model."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

N_HEADS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys of config.json for the number of heads."""
SHARED = ("embed_tokens.", "shared_head.head.")
"""Tensors beside a head of GLM or DeepSeek: copies of the model's own, which the head uses.

Qwen's would be embeddings of its own, which are not known here.
"""


TABLE_TYPE = "qwen4_exp"
STORAGE = "ple_storage"
"""Key of its text config with which mlx-vlm reads rows of n-gram tables from disk, and drops the
tensors of the tables from the weights (mlx_vlm/models/qwen4_exp)."""
SECTIONS = ("text_config", "llm_config")
TABLE = ".ple.ple_embedding.ngram_embedding."
"""Part of the names of these tensors."""


class HeadLayout(Struct, frozen=True):
    """Tensor names of a head; by default those of GLM."""

    prefix: str = "model.layers.{n}."
    """Beginning of all names; {n} is the number of the model's layers."""
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    shared: tuple[str, ...] = SHARED
    is_normed: bool = False
    """Whether drafting goes on from states after the last norm, not before it."""
    is_mask_array: bool = False
    """Whether attention takes its mask as an array, as latent attention does."""


NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
QWEN = HeadLayout("mtp.", "layers.0.", *NORMS, "fc", "norm", (), is_normed=True)
LATENT = HeadLayout(is_mask_array=True)
LAYOUTS = {
    **dict.fromkeys(("llama", "qwen3_next", "qwen3_5", "qwen3_5_moe"), QWEN),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), LATENT),
    "glm4_moe": HeadLayout(),
}
"""Layouts by the model type of config.json; our demo model has a head in Qwen's."""


class HeadTensors(Struct, frozen=True):
    """Names of a head's tensors."""

    layout: HeadLayout
    prefix: str
    is_expected: bool
    """Whether the checkpoint should have them: conversions keep the number and drop the tensors."""

    def is_of_head(self, name: str) -> bool:
        """Whether a tensor belongs to the head, and is no copy."""
        inside = name.removeprefix("language_model.")
        is_below = inside.startswith(self.prefix)
        return is_below and not inside.removeprefix(self.prefix).startswith(self.layout.shared)


def head_tensors(config: Mapping[str, Any]) -> HeadTensors | None:
    """Tensors of a head by config.json, None for unknown types."""
    layout = LAYOUTS.get(str(config.get("model_type", "")).removesuffix("_text"))
    if layout is None:
        return None
    text = config.get("text_config") or config
    is_expected = "quantization" not in config and any(text.get(key) for key in N_HEADS)
    prefix = layout.prefix.format(n=text.get("num_hidden_layers"))
    return HeadTensors(layout, prefix, is_expected)


def has_stored_table(config: Mapping[str, Any]) -> bool:
    """Whether n-gram tables stay on disk, by config.json."""
    return bool(table_manifest(config))


def table_manifest(config: Mapping[str, Any]) -> str:
    """File that names the n-gram tables on disk; "" without any."""
    if config.get("model_type") != TABLE_TYPE:
        return ""
    storages = (section.get(STORAGE) or {} for section in _sections(config).values())
    return next((str(storage["manifest"]) for storage in storages if "manifest" in storage), "")


def with_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config whose n-gram tables are weights."""
    sections = {
        name: {key: value for key, value in section.items() if key != STORAGE}
        for name, section in _sections(config).items()
    }
    return {**config, **sections}


def is_of_table(name: str) -> bool:
    """Whether a tensor belongs to an n-gram table."""
    return TABLE in name


def _sections(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: part for name in SECTIONS if isinstance(part := config.get(name), Mapping)}
