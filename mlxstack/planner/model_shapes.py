"""Shapes of models, as mlx-lm builds them in a child process."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mlxstack.host.hardware import CHILD_FAULTS, ask_mlx, last_line, program_file
from mlxstack.policy.memory.capacity import ShapeReply

MODULE = "mlxstack.engine.model.model_shape"
PROGRAM = program_file(MODULE)
"""File of the child process: by `-m` its package would import mlx-lm, and that transformers."""
MAX_S = 120.0
LIMIT_S = 20.0
"""CPU seconds to build a model; the largest published ones take two."""
MAX_BYTES = 8 * 1024**3

_shapes: dict[bytes, ShapeReply] = {}
"""Shapes of this process by config: a child that imports MLX takes most of a second."""


def shapes_of(configs: Sequence[Mapping[str, Any]]) -> list[ShapeReply]:
    """Shape of each parsed config.json, or why it has none.

    Those that are not known yet are built in one child process.
    """
    keys = [msgspec.json.encode(config, order="deterministic") for config in configs]
    unknown = {key: config for key, config in zip(keys, configs, strict=True) if key not in _shapes}
    built = dict(zip(unknown, _built([*unknown.values()]), strict=True))
    _shapes.update({key: reply for key, reply in built.items() if reply.shape is not None})
    return [built.get(key) or _shapes[key] for key in keys]


def _built(configs: Sequence[Mapping[str, Any]]) -> list[ShapeReply]:
    if not configs:
        return []
    program = ["-P", str(PROGRAM), str(LIMIT_S * len(configs)), str(MAX_BYTES)]
    try:
        return ask_mlx(program, list[ShapeReply], MAX_S, configs)
    except CHILD_FAULTS as error:
        if len(configs) > 1:
            return [reply for config in configs for reply in _built([config])]
        reason = last_line(error)
        if (code := getattr(error, "returncode", 0)) < 0:
            reason = f"building it was ended by {signal.Signals(-code).name}"
        return [ShapeReply(refusal=f"MLX cannot build this model here: {reason}")]
