"""Scaling of rotary embeddings, so that a model takes longer contexts than it was trained for.

Linear: positions divided by the factor (https://arxiv.org/abs/2306.15595). YaRN: by wavelength
(https://arxiv.org/abs/2309.00071). Both are mlx-lm's.
"""

from collections.abc import Mapping
from typing import Any

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import RopeSpec

KEYS = ("rope_parameters", "rope_scaling")
"""Where a config has it: of Transformers 5, and before."""


def scaled_config(config: Mapping[str, Any], rope: RopeSpec) -> dict[str, Any]:
    """A parsed config.json with the scaling.

    Raises SetupError for a model that has one, whose layers differ, or without its length.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    key = next((key for key in KEYS if text.get(key)), KEYS[-1])
    own: Mapping[str, Any] = text.get(key) or {}
    n_trained = int(text.get("max_position_embeddings") or 0)
    kind = own.get("rope_type") or own.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise SetupError(f"model.rope: this model scales its rotary embedding already ({kind})")
    if any(isinstance(value, dict) for value in own.values()):
        raise SetupError("model.rope: the layers of this model have different rotary embeddings")
    if not n_trained:
        raise SetupError("model.rope: config.json has no max_position_embeddings to scale")
    scaled = {
        **own,
        "type": rope.type.value,
        "rope_type": rope.type.value,
        "factor": rope.factor,
        "original_max_position_embeddings": n_trained,
    }
    changed = {**text, key: scaled}
    if text is config:
        return changed
    return {**config, "text_config": changed}


def not_scaled(architecture: str) -> str:
    """Message for an architecture that ignores the scaling."""
    return (
        f"model.rope: mlx-lm does not scale the rotary embedding of models of type "
        f"'{architecture}'; remove model.rope"
    )
