"""Drafters are known by their config.json, in the forms in which they are published."""

from typing import Any

import pytest

from mlxstack.models.drafter_configs import (
    DrafterKind,
    drafter_kind,
    eagle_config,
    is_drafter,
    planned_config,
)

LAYER = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 1024}
DFLASH = {"mask_token_id": 3, "target_layer_ids": [1, 2]}

CONFIGS: list[tuple[dict[str, Any], DrafterKind | None]] = [
    (
        {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dflash_config": DFLASH},
        DrafterKind.DFLASH2,
    ),
    (
        {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": DFLASH},
        DrafterKind.DFLASH,
    ),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, DrafterKind.EAGLE3),
    (
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        DrafterKind.EAGLE3,
    ),
    (
        {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"},
        DrafterKind.EAGLE3,
    ),
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
    ({"model_type": "llama"}, None),
    ({"architectures": None, "model_type": "llama"}, None),
]


@pytest.mark.parametrize(("config", "kind"), CONFIGS)
def test_a_drafter_is_known_by_its_config(config: dict[str, Any], kind: DrafterKind | None) -> None:
    assert drafter_kind(config) is kind


def test_drafters_of_other_kinds_are_drafters_too() -> None:
    for config in (
        {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "dflash_config": DFLASH},
        {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"},
    ):
        assert drafter_kind(config) is None
        assert is_drafter(config)
    assert not is_drafter({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})


def test_eagle_configs_of_both_forms_name_the_same() -> None:
    whole = {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER}
    flat = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **LAYER}
    for config in (whole, flat):
        found = eagle_config(config, 32)
        assert found["model_type"] == "eagle3"
        assert found["eagle_aux_hidden_state_layer_ids"] == [2, 16, 29]
        assert found["draft_vocab_size"] == 1024
        assert found["transformer_layer_config"]["hidden_size"] == 64
    named = eagle_config(flat | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, 32)
    assert named["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    named = eagle_config(whole | {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}, 32)
    assert named["eagle_aux_hidden_state_layer_ids"] == [3, 4, 5]


def test_a_plan_takes_the_layers_of_a_drafter() -> None:
    whole = {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER}
    assert planned_config(whole)["num_hidden_layers"] == 1
    assert planned_config(whole)["model_type"] == "llama"
    plain = {"model_type": "llama", "num_hidden_layers": 4}
    assert planned_config(plain) == plain
