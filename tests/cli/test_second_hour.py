"""A newcomer's second hour on a slow model: what a person reads at each step."""

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.demo import MODEL_DIR
from tests.cli.terminal import Shell
from tests.clients.pictures import png
from tests.patience import PATIENCE_S

pytest.importorskip("PIL")
pytestmark = [pytest.mark.mlx, pytest.mark.net]

SLOW = """
import time

from mlx_lm.models import llama

ModelArgs = llama.ModelArgs


class Model(llama.Model):
    def __call__(self, inputs, *args, **options):
        time.sleep(0.01 + 0.001 * inputs.shape[1])
        return super().__call__(inputs, *args, **options)
"""
"""The demo, with a delay for each pass and token."""

RULES = "You help with a shop. Be short. " * 12
CLIENTS = {"claude": "25,000", "opencode": "7,000", "codex": "8,000"}


class Person:
    """Types commands, and reads; `home` is where all is kept."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.folder = shell.folder
        self.url = f"http://127.0.0.1:{shell.port}"
        self.env = shell.env
        del self.env["MLX_STACK_WORKER"]

    def types(self, *arguments: str, code: int = 0) -> str:
        """What a command prints."""
        done = self.shell.run(*arguments)
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return str(done.stdout + done.stderr)

    def says(self, agent: str, *texts: str, system: str = RULES) -> httpx.Response:
        """A turn of an agent that a client sends with its whole history."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        for i, text in enumerate(texts):
            messages.append({"role": "assistant" if i % 2 else "user", "content": text})
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={"messages": messages, "max_tokens": 4, "temperature": 0, "agent": agent},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture
def person(shell: Shell) -> Iterator[Person]:
    folder = shell.folder / "slow-demo"
    shutil.copytree(MODEL_DIR, folder)
    (folder / "mtp.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "slow.py"}))
    (folder / "slow.py").write_text(SLOW)
    found = Person(shell)
    yield found
    found.types("down")


def test_the_second_hour(person: Person) -> None:
    starts_a_slow_model(person)
    tries_clients_that_do_not_fit(person)
    sends_an_image(person)
    asks_why_a_prompt_was_read_again(person)
    restarts(person)
    moves_to_another_home(person)


def starts_a_slow_model(person: Person) -> None:
    """The start takes longer than its limit, and tells its steps."""
    up = person.types(
        "up", str(person.folder / "slow-demo"), "--name", "slow", "--ctx", "2k", "--slots", "2",
        "--port", str(person.shell.port), "--set", "model.trust_remote_code=true",
        "--set", "server.startup_timeout_s=30s",
    )  # fmt: skip
    assert f"slow is ready at {person.url}" in up
    log = person.types("logs", "slow")
    assert re.search(r"self-check 1 of \d: rows decoded together", log)
    following = up[up.index("Next:") :]
    assert "mlx-stack chat" in following and "run claude" not in following


def tries_clients_that_do_not_fit(person: Person) -> None:
    programs = person.folder / "programs"
    programs.mkdir()
    for client in CLIENTS:
        (programs / client).write_text("#!/bin/sh\necho started\n")
        (programs / client).chmod(0o755)
    person.env["PATH"] = f"{programs}:{os.environ['PATH']}"
    for client, n_tokens in CLIENTS.items():
        refused = person.types("run", client, code=5)
        assert f"{client} sends about {n_tokens} tokens before the first word" in refused
        assert "a slot of slow-demo holds 2,048: it cannot work there" in refused
        assert "`mlx-stack plan`" in refused and "started" not in refused
    assert "started" in person.types("run", "codex", "--anyway")


def sends_an_image(person: Person) -> None:
    picture = person.folder / "picture.png"
    picture.write_bytes(png("purple"))
    answer = person.types("chat", "--image", str(picture), "-p", "What is this?")
    assert answer.strip()
    missing = person.types("chat", "--image", "nowhere.png", "-p", "What is this?", code=1)
    assert "nowhere.png" in missing and missing.count("\n") == 1
    page = httpx.get(f"{person.url}/", headers={"accept": "text/html"}, timeout=PATIENCE_S)
    assert page.status_code == 200 and 'type="file"' in page.text
    url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "And?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    sent = httpx.post(f"{person.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert sent.status_code == 200 and sent.headers["x-mlx-stack-images"].startswith("1")


def asks_why_a_prompt_was_read_again(person: Person) -> None:
    person.says("ann", "Hello!", system=f"Today is Monday. {RULES}")
    person.says("ann", "Hello!", system=f"Today is Tuesday. {RULES}")
    why = person.types("cache", "why", "ann")
    assert "Tue" in why and "Mon" in why, "both texts where they differ"
    assert re.search(r"lost [\d.,k]+ tokens", why), why
    assert "ann" in person.types("logs", "slow")


def n_reused(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def restarts(person: Person) -> None:
    person.says("ben", "Hello!")
    assert "slow" in person.types("restart", "slow")
    again = person.says("ben", "Hello!", "Hi.", "And now?")
    assert n_reused(again) > 100


def moves_to_another_home(person: Person) -> None:
    """A stopped home is copied; the agent goes on in the copy."""
    assert "slow is stopped" in person.types("down", "slow")
    copy = Path(person.env["MLX_STACK_HOME"]).with_name("copy")
    shutil.copytree(person.env["MLX_STACK_HOME"], copy)
    person.env["MLX_STACK_HOME"] = str(copy)
    up = person.types(
        "up", str(person.folder / "slow-demo"), "--name", "slow", "--ctx", "2k", "--slots", "2",
        "--port", str(person.shell.port), "--set", "model.trust_remote_code=true",
    )  # fmt: skip
    assert "slow is ready" in up
    again = person.says("ben", "Hello!", "Hi.", "And now?", "Yes.", "Good. Go on.")
    assert n_reused(again) > 100
    assert "ben" in person.types("agents")
