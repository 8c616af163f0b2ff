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
OF_WINDOW = ("rope_local_base_freq", "swa_rope_theta")
"""Names of the base of sliding window layers."""
ROTATED_PART = ("partial_rotary_factor", "rotary_pct")
BASE = ("rope_theta", "rotary_emb_base")
PLAIN = frozenset({"default", "mrope"})
"""Types of embeddings without scaling."""
BY_TRAINED = frozenset({"yarn", "deepseek_yarn", "telechat3-yarn", "longrope"})
"""Scalings that depend on the trained context, which is the whole one by default."""
EXTENDING = frozenset({"yarn", "dynamic"})
"""Scalings for contexts beyond the trained one; models are published without them."""
N_ORIGINAL = "original_max_position_embeddings"


def rope_kind(parameters: Any) -> str:
    """Type of a rotary embedding."""
    if not isinstance(parameters, Mapping):
        return "default"
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def with_flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parsed config.json with mlx-lm's keys for rotary embeddings.

    Transformers 5 writes `rope_parameters`. Most types of mlx-lm read `rope_theta` and
    `rope_scaling` alone, and would take the base of their type, without scaling. As in
    Transformers, a base inside counts before one outside, a scaling outside before one inside.
    """
    flat = dict(config)
    if isinstance(inner := flat.get("text_config"), Mapping):
        flat["text_config"] = with_flat_rope(inner)
    parameters = flat.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters:
        flat |= _flat_keys(flat, parameters)
    scaling = flat.get("rope_scaling")
    if isinstance(scaling, Mapping) and rope_kind(scaling) not in PLAIN:
        flat["rope_scaling"] = _completed(scaling, flat)
    return flat


def _flat_keys(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of mlx-lm for `rope_parameters`."""
    # Layers of several kinds have an embedding each.
    whole = parameters.get("full_attention", parameters)
    window = parameters.get("sliding_attention")
    keys: dict[str, Any] = {}
    if not isinstance(whole, Mapping) or any(isinstance(part, Mapping) for part in whole.values()):
        return keys
    if whole.get("rope_theta") is not None:
        keys |= dict.fromkeys(BASE, whole["rope_theta"])
    if isinstance(window, Mapping) and window.get("rope_theta") is not None:
        keys |= dict.fromkeys(OF_WINDOW, window["rope_theta"])
    if whole is parameters and whole.get("partial_rotary_factor") is not None:
        keys |= dict.fromkeys(ROTATED_PART, whole["partial_rotary_factor"])
    if not config.get("rope_scaling"):
        outer = {*BASE, *ROTATED_PART}
        inner = {key: value for key, value in whole.items() if key not in outer}
        keys["rope_scaling"] = None if rope_kind(whole) in PLAIN else inner
    if whole.get(N_ORIGINAL) and not config.get(N_ORIGINAL):
        # phi3 has it beside the scaling.
        keys[N_ORIGINAL] = whole[N_ORIGINAL]
    return keys


def _completed(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling with the keys and defaults of Transformers."""
    kind = rope_kind(scaling)
    whole = {key: value for key, value in scaling.items() if value is not None}
    whole = {"type": kind, "rope_type": kind, **whole}
    if isinstance(factor := whole.get("factor"), int):
        # phi3 takes no whole number.
        whole["factor"] = float(factor)
    n_trained = config.get(N_ORIGINAL)
    if kind in BY_TRAINED:
        # Without it mlx-lm takes 4096 for yarn.
        n_trained = n_trained or config.get("max_position_embeddings")
    if n_trained:
        whole.setdefault(N_ORIGINAL, n_trained)
    return whole


def scaled_config(config: Mapping[str, Any], rope: RopeSpec) -> dict[str, Any]:
    """A parsed config.json with the scaling.

    Raises SetupError for a model that has one, whose layers differ, or without its length.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    key = next((key for key in KEYS if text.get(key)), KEYS[-1])
    own: Mapping[str, Any] = text.get(key) or {}
    n_trained = int(text.get("max_position_embeddings") or 0)
    if kind := own_scaling(config):
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


def own_scaling(config: Mapping[str, Any]) -> str:
    """Type of a config's own scaling, "" without one."""
    text: Mapping[str, Any] = config.get("text_config") or config
    named = [part for key in KEYS if isinstance(part := text.get(key), Mapping)]
    kinds = (rope_kind(part) for part in named if part.get("factor") != 1)
    return next((kind for kind in kinds if kind not in PLAIN), "")


def not_scaled(architecture: str) -> str:
    """Message for an architecture that ignores the scaling."""
    return (
        f"model.rope: mlx-lm does not scale the rotary embedding of models of type "
        f"'{architecture}'; remove model.rope"
    )


def n_without_scaling(config: Mapping[str, Any]) -> int:
    """Context of a model without its scaling.

    For models whose code ignores it. 0 where they were trained with it: all answers would be wrong.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    scaling = text.get("rope_scaling") or {}
    if own_scaling(config) in EXTENDING:
        return int(scaling.get(N_ORIGINAL) or text.get("max_position_embeddings") or 0)
    return 0


def ignored_scaling(architecture: str, kind: str) -> str:
    """Message for a scaling that an architecture ignores."""
    return (
        f"config.json scales the rotary embedding ({kind}), and mlx-lm does not for models of type "
        f"'{architecture}', so its answers would be wrong; choose another model, or remove the "
        "scaling from config.json for the context without it"
    )
