"""N-gram tables of `qwen4_exp`, which mlx-vlm may leave on disk.

With `ple_storage` in its text config it reads rows of a file that a manifest names, and drops the
table's tensors from the weights: `mlx_vlm/models/qwen4_exp`.
"""

from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "qwen4_exp"
STORAGE = "ple_storage"
SECTIONS = ("text_config", "llm_config")
TABLE = ".ple.ple_embedding.ngram_embedding."
"""Part of the names of a table's tensors."""


def has_stored_table(config: Mapping[str, Any]) -> bool:
    """Whether tables stay on disk, by config.json."""
    if config.get("model_type") != ARCHITECTURE:
        return False
    return any(section.get(STORAGE) for section in _sections(config).values())


def with_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config whose tables are weights; a manifest names files of its folder."""
    sections = {
        name: {key: value for key, value in section.items() if key != STORAGE}
        for name, section in _sections(config).items()
    }
    return {**config, **sections}


def is_of_table(name: str) -> bool:
    """Whether a tensor belongs to a table."""
    return TABLE in name


def _sections(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: part for name in SECTIONS if isinstance(part := config.get(name), Mapping)}
