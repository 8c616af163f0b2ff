"""A tiny config for every row of the matrix: every model type, and variants of some."""

import copy
from pathlib import Path
from typing import Any

import yaml

Config = dict[str, Any]

TABLE = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
SUPERSET: Config = TABLE["superset"]
VARIANTS: dict[str, Config] = TABLE["variants"]
VOCAB: int = SUPERSET["vocab_size"]
WINDOW: int = SUPERSET["sliding_window"]


def outer_type(name: str) -> str:
    """The `model_type` of a row of the table: itself, or the type it is a variant of."""
    return str(VARIANTS[name]["type"]) if name in VARIANTS else name


def config_of(name: str) -> Config:
    """A config.json for a tiny model of this type or variant."""
    model_type = outer_type(name)
    added = {**TABLE["types"].get(model_type, {}), **VARIANTS.get(name, {"adds": {}})["adds"]}
    config = copy.deepcopy({**SUPERSET, **added, "model_type": model_type})
    if "text" in config:
        config["text_config"] = {**SUPERSET, "model_type": model_type, **config.pop("text")}
    return config
