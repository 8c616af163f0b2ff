"""A tiny config.json for any model type of mlx-vlm, derived from what all types name alike.

`SMALL` are small sizes by the names of fields; mlx-vlm's config classes take what they know. What
a type needs besides stands in more_models.yaml.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

from tests.matrix.configs import SUPERSET, TABLE, VOCAB

Config = dict[str, Any]

MORE = yaml.safe_load(Path(__file__).with_name("more_models.yaml").read_text(encoding="utf-8"))
FAMILIES = ("experts", "latent", "sparse", "delta", "mamba", "granite")
SMALL: Config = {
    name: value
    for family in FAMILIES
    for name, value in TABLE["families"][family].items()
} | SUPERSET | MORE["superset"]  # fmt: skip
"""Small values of fields, whose names mean the same in every family."""
NOT_LANGUAGE: dict[str, str] = {
    name: reason for reason, names in MORE["not_language"].items() for name in names
}
"""Types that generate no text by a language model, and why."""


def config_of(name: str, n_vocab: int = VOCAB) -> Config:
    """A config.json for a tiny model of mlx-vlm's type `name`."""
    own = copy.deepcopy(MORE["types"].get(name) or {})
    text = {
        **copy.deepcopy(SMALL),
        "model_type": name,
        **own.pop("text", {}),
        "vocab_size": n_vocab,
    }
    vision = {**copy.deepcopy(MORE["vision"]), "model_type": name, **own.pop("vision_config", {})}
    return {**text, "text_config": text, "vision_config": vision, "model_type": name, **own}
