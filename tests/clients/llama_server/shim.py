"""Stands where llama.cpp's tests expect `llama-server`: serves a preset made of its options.

SUITE_MODEL is the folder of the model.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlxstack.cli.main import main as mlx_stack

FLAGS = frozenset(
    {
        "--cont-batching",
        "--embedding",
        "--jinja",
        "--kv-unified",
        "--metrics",
        "--no-jinja",
        "--no-slots",
        "--offline",
        "--slots",
        "--ui-mcp-proxy",
    }
)
MIN_CONTEXT = 64


def options(arguments: list[str]) -> dict[str, str]:
    """Options of llama-server by name; a flag has no value."""
    values = {}
    remaining = iter(arguments)
    for name in remaining:
        values[name] = "" if name in FLAGS else next(remaining)
    return values


def preset(values: dict[str, str]) -> dict[str, Any]:
    """The preset that says the same; options that none can say are left out."""
    server: dict[str, Any] = {"host": values["--host"], "port": int(values["--port"])}
    if "--api-key" in values:
        server["api_keys"] = [values["--api-key"]]
    if "--sleep-idle-seconds" in values:
        server["idle_unload_s"] = int(values["--sleep-idle-seconds"])
    sections: dict[str, Any] = {
        "name": "suite",
        "model": {"id": os.environ["SUITE_MODEL"], "alias": values.get("--alias", "none")},
        "server": server,
        "prefix_cache": {"metrics": {"enabled": "--metrics" in values}},
    }
    if "--embedding" in values:
        return {**sections, "kind": "embedding", "slots": {"count": 1, "n_ctx": 512}}
    count = int(values["--parallel"])
    n_ctx = int(values["--ctx-size"])
    slot_ctx = n_ctx if "--kv-unified" in values else n_ctx // count
    limit = int(values.get("--n-predict", -1))
    return {
        **sections,
        "slots": {"count": count, "n_ctx": max(MIN_CONTEXT, slot_ctx)},
        "prefill": {"chunk_size": int(values["--batch-size"])},
        "sampling": {"temperature": float(values["--temp"]), "max_tokens": limit},
    }


def main() -> None:
    """Serve as `mlx-stack up --foreground` does."""
    home = Path(tempfile.mkdtemp(prefix="suite"))
    file = home / "suite.yaml"
    file.write_text(json.dumps(preset(options(sys.argv[1:]))), encoding="utf-8")
    os.environ["MLX_STACK_HOME"] = str(home)
    sys.argv = ["mlx-stack", "up", str(file), "--foreground"]
    mlx_stack()


if __name__ == "__main__":
    main()
