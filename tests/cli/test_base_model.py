"""A base model, which has no chat template: named at `up`, continued by `chat`."""

import json
import re
import shutil
from collections.abc import Iterator

import httpx
import pytest

from tests.cli.terminal import Shell
from tests.conftest import ModelOf
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]


@pytest.fixture
def base(shell: Shell, model_of: ModelOf) -> Iterator[Shell]:
    """Home with the folder of a model without chat template."""
    del shell.env["MLX_STACK_WORKER"]
    folder = shell.folder / "base"
    shutil.copytree(model_of("tiny"), folder)
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields.pop("chat_template", None)
    config.write_text(json.dumps(fields))
    yield shell
    shell.run("down")


def test_up_names_it_and_shows_a_request_that_works(base: Shell) -> None:
    folder = str(base.folder / "base")
    up = base.run("up", folder, "--port", str(base.port), "--ctx", "1k", "--slots", "1")
    assert up.returncode == 0, up.stderr
    assert "warning: a base model: it continues text" in up.stderr
    assert "(1 agent at once, 1k tokens of context each)" in up.stdout
    assert "chat template: " not in up.stderr
    command = re.search(r"curl (\S+) .* -d '(.*)'", up.stdout)
    assert command is not None and command[1].endswith("/v1/completions")
    answer = httpx.post(command[1], content=command[2], timeout=PATIENCE_S)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


def test_chat_continues_text_and_the_error_names_the_path(base: Shell) -> None:
    folder = str(base.folder / "base")
    assert base.run("up", folder, "--port", str(base.port), "--ctx", "1k").returncode == 0
    said = base.run("chat", "base", "-p", "one two three", "--max-tokens", "8")
    assert said.returncode == 0, said.stderr
    generated = re.search(r"(\d+) tokens generated", said.stderr)
    assert said.stdout.strip() and generated and 1 <= int(generated[1]) <= 8
    refused = base.run("chat", "-p", "hi", "--system", "You are short.")
    assert refused.returncode != 0 and "base model" in refused.stderr
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"http://127.0.0.1:{base.port}/v1/chat/completions", json=body)
    assert answer.status_code == 501
    assert "send a prompt to /v1/completions" in answer.json()["error"]["message"]


def test_a_served_folder_is_a_model_until_its_preset_is_removed(base: Shell) -> None:
    folder = str(base.folder / "base")
    assert base.run("up", folder, "--port", str(base.port), "--ctx", "1k").returncode == 0

    def served() -> list[str]:
        listed = json.loads(base.run("models", "--json").stdout)["models"]
        return [one["name"] for one in listed if one["path"] == folder]

    assert served() == ["base"]
    refused = base.run("presets", "rm", "base")
    assert refused.returncode != 0 and "base is running" in refused.stderr
    assert base.run("down").returncode == 0
    assert base.run("presets", "rm", "base").returncode == 0
    assert served() == []
    assert base.run("presets", "rm", "demo").returncode != 0


def test_template_says_none(base: Shell) -> None:
    folder = str(base.folder / "base")
    shown = base.run("template", folder)
    assert shown.returncode == 0, shown.stderr
    assert "none: a base model" in shown.stdout
    assert json.loads(base.run("template", folder, "--json").stdout) == {"template": None}
