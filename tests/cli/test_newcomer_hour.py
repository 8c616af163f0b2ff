"""A newcomer's hour through the installed command: what a person reads at each step."""

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests import forked
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

TRACE = (
    "Why does this fail?\nTraceback (most recent call last):\n  File a.py, line 1\nKeyError: 'x'"
)
AGENTS = ("shop-api", "shop-web", "infra")


class Person:
    """Types commands in a terminal with a home of its own, and reads."""

    def __init__(self, shell: Shell) -> None:
        self.env = shell.env | {"MLX_STACK_MEMORY": "16GB"}
        del self.env["MLX_STACK_WORKER"]
        self.folder = shell.folder
        self.port = shell.port
        self.url = f"http://127.0.0.1:{self.port}"

    def types(
        self, line: str, text: str | None = None, code: int = 0, *, is_forked: bool = True
    ) -> str:
        """What a command line prints, with `text` piped into it."""
        done = subprocess.run(
            [*([sys.executable] if is_forked else []), str(forked.COMMAND), *line.split()],
            env=self.env,
            cwd=self.folder,
            input=text or "",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, f"{line}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def person(shell: Shell) -> Iterator[Person]:
    if not forked.COMMAND.exists():
        pytest.skip("the command is not installed beside this Python")
    found = Person(shell)
    yield found
    found.types("down")


def test_the_first_hour(person: Person) -> None:
    looks_around(person)
    makes_mistakes(person)
    starts_two_models(person)
    chats(person)
    runs_three_agents(person)
    looks_again(person)
    stops(person)


def looks_around(person: Person) -> None:
    assert "Run:\n  up " in person.types("--help", is_forked=False)
    assert "nothing is running" in person.types("down")
    plan = person.types("plan")
    assert re.search(r"mlx-stack up \S+", plan), "the plan ends with a command to copy"
    assert "qwen3.5" in plan and "minimax" not in plan, "only what fits 16 GB"


def makes_mistakes(person: Person) -> None:
    wrong = person.types("up qwen3:0.6b", code=5)
    assert "Ollama's" in wrong and "mlx-community/Qwen3-0.6B-4bit" in wrong
    nowhere = person.types("up qwen3-codr-30b-a3b", code=5)
    assert "did you mean `qwen3-coder-30b-a3b`" in nowhere
    large = person.types(f"up qwen3.6-35b-a3b --port {person.port}", code=5)
    assert "does not fit" in large and "GiB are needed" in large
    assert "no `search` here" in person.types("search qwen", code=2)


def starts_two_models(person: Person) -> None:
    up = person.types(f"up demo demo-embedding --port {person.port}")
    assert f"gateway is ready at {person.url}" in up
    assert "demo answers requests without a model; others: demo-embedding" in up
    status = person.types("status")
    assert "gateway" in status and "demo-embedding" in status and person.url in status
    again = person.types(f"up demo demo-embedding --port {person.port}")
    assert person.url in again and "error" not in again


def chats(person: Person) -> None:
    first = person.types("chat -p Hello!")
    assert "starting demo ..." in first
    pasted = person.types("chat demo --max-tokens 8", text=TRACE)
    assert "starting" not in pasted and pasted.strip(), "one answer to the whole paste"
    body = {"model": "nope", "messages": [{"role": "user", "content": "Hello!"}]}
    refused = httpx.post(f"{person.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert refused.status_code == 404
    message = refused.json()["error"]["message"]
    assert "nope" in message and "demo" in message, message


def runs_three_agents(person: Person) -> None:
    shared = "You help with a shop of many files. Be short and name the file that you change."
    for turn in ("Hello!", "And now?"):
        for agent in AGENTS:
            messages = [
                {"role": "system", "content": shared},
                {"role": "user", "content": f"{agent}: {turn}"},
            ]
            answer = httpx.post(
                f"{person.url}/v1/chat/completions",
                json={"model": "demo", "messages": messages, "max_tokens": 4},
                headers={"X-Agent-Id": agent, "X-Mlx-Stack-Agent": agent},
                timeout=PATIENCE_S,
            )
            assert answer.status_code == 200, answer.text
    listed = person.types("agents")
    for agent in AGENTS:
        assert agent in listed, listed
    assert "there is no agent nobody" in person.types("agents show nobody", code=1)


def looks_again(person: Person) -> None:
    cache = person.types("cache")
    assert "of the requests of the last hour" in cache and "memory" in cache
    why = person.types("cache why nope", code=1)
    assert "no recent request or agent is called nope" in why
    assert "slot" in person.types("slots").lower()
    assert "demo" in person.types("status")


def stops(person: Person) -> None:
    down = person.types("down").splitlines()
    assert down[0] == "gateway is stopped" and "demo is stopped" in down
    assert "nothing is running" in person.types("down")
    assert "no service is running; start one with `mlx-stack up" in person.types(
        "chat -p Hello!", code=3
    )
