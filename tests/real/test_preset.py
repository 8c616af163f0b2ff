"""The shipped preset of the smallest real model, downloaded from a hub as any other."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import hub
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S
from tests.real.folders import SMOLLM2, folder

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow, pytest.mark.real]

PUBLISHED = "HuggingFaceTB/SmolLM2-135M-Instruct"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    yield shell
    shell.kill()


def test_up_downloads_the_smallest_real_model_and_it_answers(shell: Shell) -> None:
    model = folder(SMOLLM2)
    with hub.serving(hub.files_of(model), PUBLISHED) as published:
        published.go_on.set()
        shell.env |= published.env(shell.folder / "hub")
        up = shell.run("up", "smollm2-135m", "--port", str(shell.port))
        assert up.returncode == 0, up.stderr
        assert "model.safetensors" in published.fetched
    try:
        body = {"messages": ASKED, "temperature": 0, "max_tokens": 24}
        url = f"http://127.0.0.1:{shell.port}"
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]
        params = httpx.get(f"{url}/props").json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_p"]) == (0.2, 0.9)
        chat = shell.run("chat", "smollm2-135m", "-p", "Say hello.", "--max-tokens", "8")
        assert chat.returncode == 0 and re.search(r"[1-8] tokens generated", chat.stderr)
    finally:
        shell.run("down")
