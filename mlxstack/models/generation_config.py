"""Sampling that the card of a model recommends: its generation_config.json."""

import logging
import reprlib
import typing
from pathlib import Path
from typing import Any

import msgspec

from mlxstack.core.errors import SetupError
from mlxstack.core.model_info import SamplingDefaults
from mlxstack.core.preset import SamplingSpec
from mlxstack.models.bounded_json import MAX_SIZE, read_object

log = logging.getLogger(__name__)

FILE = "generation_config.json"
TYPES = typing.get_type_hints(SamplingSpec, include_extras=True)
"""Types of a preset's sampling, with their bounds."""


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Recommended sampling of a model folder; empty without a readable file.

    `do_sample` false is greedy. Absent it says nothing: published files leave it out beside a
    temperature, and vLLM does not read it. Values that a preset could not have are left out, each
    with a line in the log.
    """
    try:
        config = read_object(folder / FILE)
    except SetupError:
        return SamplingDefaults()
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    usable: dict[str, Any] = {}
    for name in SamplingDefaults.__struct_fields__:
        value = config.get(name)
        if value is None:
            continue
        try:
            usable[name] = _converted(name, value)
        except (msgspec.ValidationError, TypeError, OverflowError):
            text = reprlib.repr(value)
            log.warning("%s: %s cannot be %s, which is left out", FILE, name, text)
    return SamplingDefaults(**usable)


def _converted(name: str, value: Any) -> float | int:
    """The value as a preset could have it. Raises ValidationError, TypeError, OverflowError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    converted: float | int = msgspec.convert(value, TYPES[name])
    # Written so that NaN is refused too.
    if not abs(converted) <= MAX_SIZE:
        raise OverflowError(name)
    return converted
