"""What MLX computes on; `python -m mlxstack.engine.device` tells it as JSON."""

import json
import sys

import mlx.core as mx


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
