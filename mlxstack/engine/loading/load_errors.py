"""Words for the errors with which mlx-lm refuses a model folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.models.bounded_json import read_object
from mlxstack.models.model_files import CONFIG, missing_weights

MAX_NAMED = 4
MAX_CHARS = 600
STRAY = re.compile(r"Received (\d+) parameters not in model:\s*(.*?)\.?\s*$", re.DOTALL)
UNREAD = re.compile(r"unsupported dtype (\w+)")
OWN_CODE = "trust_remote_code"
OF_CONFIG = (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""Errors of mlx-lm at an incomplete config."""
ABSENT = re.compile(r"Missing (\d+) parameters:\s*(.*?)\.?\s*$", re.DOTALL)


def why_not_loaded(folder: Path, error: BaseException) -> str:
    """Reason of a failed load in one line.

    Missing files, tensors or keys of config.json are named; else it is the error.
    """
    if lacking := missing_weights(folder):
        return f"it lacks {_first(lacking)}"
    text = str(error)
    if match := UNREAD.search(text):
        return (
            f"its weights hold numbers of the type {match[1]}, which MLX does not read; take an "
            "MLX version of this model, or one in bfloat16"
        )
    if isinstance(error, ValueError) and OWN_CODE in text:
        return (
            "it has Python code of its own (model_file in config.json), which runs only with "
            "`--set model.trust_remote_code=true`; read it before"
        )
    for pattern, fault in ((STRAY, "have no place in the model"), (ABSENT, "are missing")):
        if match := pattern.search(text):
            names = [name.strip() for name in match[2].split(",")]
            return f"{match[1]} tensors of its weights {fault}: {_first(names)}"
    if isinstance(error, OF_CONFIG):
        try:
            shape_of_config(read_object(folder / CONFIG))
        except (Unsupported, SetupError) as refused:
            return refused.message
    return in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """The words of an error, or its type where it has none."""
    plain = " ".join(str(error).split()) or type(error).__name__
    if len(plain) <= MAX_CHARS:
        return plain
    return f"{plain[:MAX_CHARS]} ..."


def _first(names: Sequence[str]) -> str:
    named = ", ".join(names[:MAX_NAMED])
    return f"{named}, ..." if len(names) > MAX_NAMED else named
