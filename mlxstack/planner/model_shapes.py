"""Shapes of models from a child process: only the engine imports MLX."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlxstack.host.hardware import for_mlx
from mlxstack.policy.memory.kv_geometry import ShapeReply

# The file itself: with `-m` its package would import mlx-lm, and that transformers.
PROGRAM = Path(__file__).parent.parent / "engine" / "model" / "model_shape.py"
LONGEST_S = 120.0
LIMIT_S = 20.0
"""CPU seconds to build a model; the largest published ones take two."""
MAX_BYTES = 8 * 1024**3


def shapes_of(configs: Sequence[Mapping[str, Any]]) -> list[ShapeReply]:
    """Return the shape of each parsed config.json, or why it has none."""
    if not configs:
        return []
    env = {**os.environ, **for_mlx(os.environ)}
    try:
        # Without close_fds CPython spawns instead of forking a process that maps a model.
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM), str(LIMIT_S * len(configs)), str(MAX_BYTES)],
            input=msgspec.json.encode(list(configs)),
            env=env,
            capture_output=True,
            timeout=LONGEST_S,
            check=True,
            close_fds=False,
        )
        return msgspec.json.decode(done.stdout, type=list[ShapeReply])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as why:
        if len(configs) > 1:
            return [reply for config in configs for reply in shapes_of([config])]
        lines = (getattr(why, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else str(why)
        if (code := getattr(why, "returncode", 0)) < 0:
            reason = f"building it was ended by {signal.Signals(-code).name}"
        return [ShapeReply(refusal=f"MLX cannot build this model here: {reason}")]
