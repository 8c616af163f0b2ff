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
    found = {}
    rest = iter(arguments)
    for name in rest:
        found[name] = "" if name in FLAGS else next(rest)
    return found


def preset(given: dict[str, str]) -> dict[str, Any]:
    """The preset that says the same; options that none can say are left out."""
    server: dict[str, Any] = {"host": given["--host"], "port": int(given["--port"])}
    if "--api-key" in given:
        server["api_keys"] = [given["--api-key"]]
    if "--sleep-idle-seconds" in given:
        server["idle_unload_s"] = int(given["--sleep-idle-seconds"])
    made: dict[str, Any] = {
        "name": "suite",
        "model": {"id": os.environ["SUITE_MODEL"], "alias": given.get("--alias", "none")},
        "server": server,
        "prefix_cache": {"metrics": {"enabled": "--metrics" in given}},
    }
    if "--embedding" in given:
        return {**made, "kind": "embedding", "slots": {"count": 1, "n_ctx": 512}}
    count = int(given["--parallel"])
    n_ctx = int(given["--ctx-size"])
    each = n_ctx if "--kv-unified" in given else n_ctx // count
    limit = int(given.get("--n-predict", -1))
    return {
        **made,
        "slots": {"count": count, "n_ctx": max(MIN_CONTEXT, each)},
        "prefill": {"chunk_size": int(given["--batch-size"])},
        "sampling": {"temperature": float(given["--temp"]), "max_tokens": limit},
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
