"""Facts of MLX's device, printed as JSON.

`python -P FILE` does so without the package, whose import takes seconds. By `-m` it fails where
mlx-lm cannot be imported.
"""

import json
import os
import sys

import mlx.core as mx

from mlxstack.host.hardware import CPU_VARIABLE


def device_facts() -> dict[str, object]:
    """Kind, name, architecture and memory of the device.

    `limit_bytes` is the recommended working set, 0 for none. Metal recommends less than the memory
    of the computer.
    """
    facts = mx.device_info()
    return {
        "kind": "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu",
        "name": facts.get("device_name", ""),
        "architecture": facts.get("architecture", ""),
        "limit_bytes": facts.get("max_recommended_working_set_size", 0),
    }


if __name__ == "__main__":
    if os.environ.get(CPU_VARIABLE):
        mx.set_default_device(mx.cpu)
    sys.stdout.write(json.dumps(device_facts()))
