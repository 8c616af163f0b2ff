"""A3, A12, A14: what was set is served; the next model is fetched while this one answers."""

import json
import subprocess

import httpx
import pytest

from mlxstack.demo import MODEL_DIR
from tests import hub
from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def test_a3_a12_a14_what_was_set_is_served_and_preloading_stops_nobody(shell: Shell) -> None:
    del shell.env["MLX_STACK_WORKER"]
    (shell.folder / "next.yaml").write_text(f"model: {{id: {hub.MODEL}}}\n")
    files = {file.name: file.read_bytes() for file in MODEL_DIR.iterdir()}
    url = f"http://127.0.0.1:{shell.port}"
    with hub.serving(files) as here:
        shell.env |= here.env(shell.folder / "hub")
        shell.env |= {"MLX_STACK_BATCH_MAX_SIZE": "5", "MLX_STACK_PREFIX_CACHE_MAX_ENTRIES": "77"}
        up = shell.up()
        assert up.returncode == 0, up.stderr
        props = httpx.get(f"{url}/props").json()
        assert props["default_generation_settings"]["n_ctx"] == 1024
        assert (props["max_batch_size"], props["max_entries"]) == (5, 77)
        preloading = subprocess.Popen(
            [*CLI, "swap", "next.yaml", "--prepare", "--json"],
            cwd=shell.folder,
            env=shell.env,
            stdout=subprocess.PIPE,
        )
        assert here.is_held.wait(PATIENCE_S)
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] > 1
        assert preloading.poll() is None
        here.go_on.set()
        told, _ = preloading.communicate(timeout=PATIENCE_S)
    assert preloading.returncode == 0
    assert json.loads(told)["n_bytes"] > 1_000_000
    assert httpx.get(f"{url}/props").json()["model_alias"] == "demo"
    shell.run("down")
