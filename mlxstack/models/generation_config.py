"""Sampling that the card of a model recommends: its generation_config.json."""

import math
from pathlib import Path

from mlxstack.core.errors import SetupError
from mlxstack.core.model_info import SamplingDefaults
from mlxstack.models.model_files import read_object

FILE = "generation_config.json"


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Recommended sampling of a model folder; empty without a readable file.

    `do_sample` false is greedy. Absent it says nothing: published files leave it out beside a
    temperature, and vLLM does not read it.
    """
    try:
        config = read_object(folder / FILE)
    except SetupError:
        return SamplingDefaults()
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    known = SamplingDefaults.__struct_fields__
    return SamplingDefaults(**{name: config[name] for name in known if _is_number(config, name)})


def _is_number(config: dict[str, object], name: str) -> bool:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
