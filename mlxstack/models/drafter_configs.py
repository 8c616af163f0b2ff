"""Configs of drafters, which draft from hidden states of another model.

Sources: github.com/z-lab/dflash (DFlash, DFlash2) and github.com/vllm-project/speculators and
github.com/SafeAILab/EAGLE (EAGLE-3).
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

EAGLE_LAYER = "midlayer."
"""Beginning of the tensors of EAGLE's only layer, as its authors publish it."""


class DrafterKind(Enum):
    """Kind of drafter."""

    DFLASH = "DFlash"
    DFLASH2 = "DFlash2"
    EAGLE3 = "EAGLE-3"


KEYS = ("dflash_config", "speculators_config", "speculators_model_type")
"""Keys that a drafter of any kind may have, and no model that drafts alone."""


def drafter_kind(config: Mapping[str, Any]) -> DrafterKind | None:
    """Kind of drafter by config.json.

    None for a model that drafts alone, and for kinds not known here.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    if "DFlash2DraftModel" in names:
        return DrafterKind.DFLASH2
    if "DFlashDraftModel" in names:
        return DrafterKind.DFLASH
    is_eagle = any(
        name.endswith(("Eagle3", "Eagle3Speculator", "Eagle3DraftModel")) for name in names
    )
    types = (config.get("speculators_model_type"), config.get("model_type"))
    if is_eagle or "eagle3" in types:
        return DrafterKind.EAGLE3
    return None


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether it is a drafter, be its kind known here or not."""
    return drafter_kind(config) is not None or any(key in config for key in KEYS)


def eagle_config(config: Mapping[str, Any], n_target_layers: int) -> dict[str, Any]:
    """Config of an EAGLE-3 drafter in the form of speculators.

    Its authors write the keys of its layer beside the others. Where no layers of the target are
    named, they are the usual three.
    """
    flat = dict(config)
    own = dict(flat.pop("eagle_config", None) or {})
    flat.setdefault("transformer_layer_config", dict(config))
    flat.setdefault("draft_vocab_size", dict(flat["transformer_layer_config"]).get("vocab_size"))
    layers = flat.get("eagle_aux_hidden_state_layer_ids") or own.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    usual = [2, n_target_layers // 2, n_target_layers - 3]
    return flat | {"model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": layers or usual}


def planned_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config of a model with as much KV as a drafter.

    Keys that decide no size, and may be missing or elsewhere in a drafter's, have any value.
    """
    kind = drafter_kind(config)
    if kind is None:
        return dict(config)
    layer = config.get("transformer_layer_config")
    plain = dict(layer if isinstance(layer, Mapping) else config)
    model_type = "llama" if kind is DrafterKind.EAGLE3 else "qwen3"
    return {"tie_word_embeddings": True, "rope_theta": 10000.0, **plain, "model_type": model_type}
