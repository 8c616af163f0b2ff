"""What MLX computes on; `python -m mlxstack.engine.device` tells it as JSON."""

import gc
import json
import sys
import traceback

import mlx.core as mx


def active_bytes() -> int:
    """Bytes of all arrays in use, MLX's cached buffers not among them. Thread-safe."""
    gc.collect()
    return int(mx.get_active_memory())


def clear_traceback_frames(error: BaseException | None) -> None:
    """An error that is kept does not keep the arrays of those who raised it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def has_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def told() -> dict[str, object]:
    """The kind and name of the device, and the bytes that it recommends to hold at most; 0: none.

    What Metal recommends is less than the memory of the computer.
    """
    facts = mx.device_info()
    return {
        "kind": "gpu" if has_gpu() else "cpu",
        "name": facts.get("device_name", ""),
        "limit_bytes": facts.get("max_recommended_working_set_size", 0),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(told()))
