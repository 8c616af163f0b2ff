"""Twenty first-time mistakes, each answered in one line with the cause and a remedy."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from mlxstack.cli.main import ELSEWHERE, app
from tests.cli.terminal import Shell
from tests.cli.test_words import run

MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    # Verbs of other tools.
    (("list",), 2, r"there is no `list` here; use `mlx-stack"),
    (("stop", "demo"), 2, r"there is no `stop` here; use `mlx-stack down`"),
    (("serve", "qwen3-coder-30b-a3b"), 2, r"use `mlx-stack up qwen3-coder-30b-a3b`"),
    (("serve",), 2, r"use `mlx-stack up MODEL`"),
    (("launch", "claude"), 2, r"use `mlx-stack run CLIENT`"),
    (("login",), 2, r"use `hf auth login`"),
    (("start", "demo"), 2, r"use `mlx-stack up MODEL`"),
    (("top",), 2, r"use `mlx-stack tui`"),
    (("generate", "hello"), 2, r"use `mlx-stack chat`"),
    (("bench", "serve"), 2, r"`mlx-stack bench dev`"),
    # Typing errors.
    (("statsu",), 2, r"No such command 'statsu'. Did you mean 'status'"),
    (("up", "demo", "--prot", "1"), 2, r"No such option: --prot .*--port"),
    (("up", "demo", "--port", "22x"), 2, r"'--port': not a whole number; see `.* up --help`"),
    (("up",), 2, r"Missing argument .*; see `.* up --help`"),
    (("run", "cloude"), 2, r"no client is called `cloude`; did you mean `claude`\?"),
    (("run", "cursor"), 2, r"no client is called `cursor`; there is claude, codex, "),
    (("logs", "demoo"), 3, r"no service `demoo` was ever started here"),
    # Nothing runs.
    (("slots",), 3, r"no service is running; start one with `mlx-stack up"),
    (("bench",), 3, r"no service is running; start one with `mlx-stack up"),
    (("agents", "show", "nobody"), 3, r"no service is running; start one with `mlx-stack up"),
    (("chat", "--url", "http://127.0.0.1:1", "-p", "hi"), 3, r"no answer from http://127.0.0.1:1"),
    (("env", "claude", "--url", "localhost:7109"), 2, r"write it as http://127.0.0.1:7109"),
    (("key", "--tier", "urgent"), 2, r"there is no tier 'urgent'; known are high, normal, low"),
]


@pytest.mark.parametrize(
    ("words", "code", "answer"), MISTAKES, ids=[" ".join(words) for words, _, _ in MISTAKES]
)
def test_a_mistake_is_answered_in_one_line(
    tmp_path: Path, words: tuple[str, ...], code: int, answer: str
) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert re.search(answer, done.stderr), done.stderr


def test_every_equivalent_of_a_foreign_verb_exists() -> None:
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for text in ELSEWHERE.values():
        words = text.split(",")[0].split()
        if words[0] == "mlx-stack" and not words[1].startswith("--"):
            assert words[1] in verbs, text


@pytest.mark.net
@pytest.mark.mlx
def test_mistakes_with_a_running_service(shell: Shell) -> None:
    del shell.env["MLX_STACK_WORKER"]
    assert shell.up().returncode == 0
    for words, answer in (
        (("slots", "save", "9", "x"), "error: Invalid slot ID 9: this service has slots 0 to 2\n"),
        (("agents", "show", "nobody"), "error: there is no agent nobody"),
    ):
        done = shell.run(*words)
        assert done.returncode == 1
        assert done.stderr.startswith(answer) and done.stderr.count("\n") == 1
    missing = shell.run("run", "pi", PATH="/nowhere")
    assert missing.returncode == 1
    assert "install it with `npm install -g @mariozechner/pi-coding-agent`" in missing.stderr
