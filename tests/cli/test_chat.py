"""`chat`: turns on a terminal, piped input, agents, and Ctrl-C, against the demo model."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.running import Running
from tests.cli.pseudo_terminal import Terminal
from tests.cli.terminal import CLI, Shell
from tests.clients.stage import playing
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

XTERM = {"TERM": "xterm-256color"}
REMEMBER = "Remember the magic word: tutorialdemo."
SUMMARY = re.compile(
    r"\[prompt: (\d+) tokens reused, (\d+) new; first token after [\d.]+ s; "
    r"(\d+) tokens generated, [\d.]+ tok/s\]"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("demo"))
    del shell.env["MLX_STACK_WORKER"]
    shell.preset.write_text(shell.preset.read_text().replace("n_ctx: 1024", "n_ctx: 4096"))
    up = shell.up()
    assert up.returncode == 0, up.stderr
    yield shell
    shell.run("down")
    shell.kill()


@pytest.fixture
def demo(service: Shell) -> Shell:
    """The demo model, without KV of what was said before."""
    with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=PATIENCE_S) as client:
        for slot in range(3):
            client.post(f"/slots/{slot}?action=erase").raise_for_status()
        for agent in client.get("/v1/agents").raise_for_status().json()["data"]:
            client.delete(f"/v1/agents/{agent['id']}").raise_for_status()
        client.post("/cache/clear", json={}).raise_for_status()
    return service


def figures(text: str) -> tuple[int, int, int]:
    found = SUMMARY.search(text)
    assert found is not None, text
    reused, new, made = (int(group) for group in found.groups())
    return reused, new, made


def test_turns_reuse_what_was_computed_and_commands_work(demo: Shell) -> None:
    chat = Terminal(demo, "chat")
    chat.until("/help lists commands")
    chat.until(chat.prompt)
    chat.type(REMEMBER)
    first = chat.until("tok/s]") + "tok/s]"
    reused, new, made = figures(first)
    assert (reused, made > 0) == (0, True)
    assert "tutorialdemo" in first
    chat.until(chat.prompt)
    chat.type("What is the magic word?")
    second = chat.until("tok/s]") + "tok/s]"
    again = figures(second)
    assert again[0] >= reused + new, "the first prompt is reused"
    assert "tutorialdemo" in second
    chat.type("/agent reviewer")
    chat.until("new agent reviewer")
    chat.type(REMEMBER)
    chat.until("tok/s]")
    chat.type("/new")
    chat.until("new conversation")
    chat.type("/agent reviewer")
    chat.until("reviewer continues after 2 messages")
    chat.type("What is the magic word?")
    assert "tutorialdemo" in chat.until("tok/s]")
    chat.type("/help")
    chat.until("/agent NAME")
    assert chat.close() == 0
    history = json.loads(demo.run("agents", "history", "reviewer", "--json").stdout)
    assert len(history["messages"]) == 4


def test_piped_input_is_one_prompt_and_only_the_answer_is_on_stdout(demo: Shell) -> None:
    def piped(text: str, *args: str) -> "subprocess.CompletedProcess[str]":
        command = [*CLI, "chat", *args]
        return subprocess.run(
            command, env=demo.env, input=text, capture_output=True, text=True, check=False
        )

    done = piped(REMEMBER, "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "tutorialdemo" in done.stdout
    reused, new, made = figures(done.stderr)
    assert reused + new > 0 and made > 0
    empty = piped("  \n")
    refusal = "error: the prompt is empty; give it with -p, or on the standard input\n"
    assert (empty.returncode, empty.stderr) == (2, refusal)
    flagged = demo.run("chat", "-p", REMEMBER, "--system", "You are short.")
    assert flagged.returncode == 0 and flagged.stdout.strip()


def test_nothing_runs_and_nobody_can_be_asked(shell: Shell) -> None:
    done = subprocess.run(
        [*CLI, "chat"], env=shell.env | {"MLX_STACK_MEMORY": "64GB"}, input="hi",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert re.fullmatch(
        r"error: no service is running; start one with `mlx-stack up qwen\S+( --\S+ \S+)*`\n",
        done.stderr,
    )
    small = subprocess.run(
        [*CLI, "chat"], env=shell.env | {"MLX_STACK_MEMORY": "2GB"}, input="hi",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert small.returncode == 5
    assert "no preset with 64k of context fits" in small.stderr


def test_run_offers_the_recommended_model_on_a_terminal(shell: Shell) -> None:
    shell.env["MLX_STACK_MEMORY"] = "64GB"
    terminal = Terminal(shell, "run", "claude")
    question = terminal.until("[Y/n]")
    assert re.search(r"No service is running. Start \S+ \(\d x 64k tokens\) for claude\?", question)
    assert "demo" not in question
    terminal.type("n")
    terminal.until("start one with `mlx-stack up ")
    assert terminal.process.wait(PATIENCE_S) == 3


def test_a_model_that_does_not_run_is_started(shell: Shell) -> None:
    """The tests' worker answers no chat; that it was started is what counts."""
    done = subprocess.run(
        [*CLI, "chat", str(shell.preset)], env=shell.env, input="hi",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shell.services()["tiny"]["state"] == "healthy"
    assert done.returncode == 1 and "not here" in done.stderr


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Running]:
    """A model that says a very long answer."""
    counting = " ".join(map(str, range(9000)))
    with playing(tmp_path / "slow", [{"when": ".", "say": counting}], 65536) as found:
        yield found


@pytest.mark.parametrize("env", [{}, XTERM], ids=["dumb", "xterm"])
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(
    slow: Running, shell: Shell, env: dict[str, str]
) -> None:
    chat = Terminal(shell, "chat", "--url", slow.url, **env)
    chat.until(chat.prompt)
    chat.type("tell me everything")
    chat.until("1 2 3")
    os.kill(chat.process.pid, signal.SIGINT)
    chat.until("[stopped]")
    chat.until(chat.prompt)
    chat.type("/new")
    chat.until("new conversation")
    assert chat.close() == 0
    # A connection that closes may be half closed only, so that its end is noticed later.
    requests = wait_until(slow.service.request_log.requests)
    assert requests[0].ended == "cancelled"


def test_the_chat_imports_no_engine() -> None:
    code = "import sys, mlxstack.cli.commands.chat, mlxstack.cli.chat_session; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    late = {
        "mlx",
        "mlx_lm",
        "litestar",
        "textual",
        "prompt_toolkit",
        "markdown_it",
        "rich.markdown",
    }
    assert not late & set(told.stdout.split())


def test_sigterm_ends_an_answer_in_silence(slow: Running, shell: Shell) -> None:
    command = [*CLI, "chat", "--url", slow.url, "-p", "tell me everything", "--max-tokens", "60000"]
    with subprocess.Popen(
        command, env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.terminate()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 143


def test_sigterm_ends_a_chat_in_silence(slow: Running, shell: Shell) -> None:
    for prompt in ("", "tell me everything"):
        chat = Terminal(shell, "chat", "--url", slow.url, **XTERM)
        chat.until(chat.prompt)
        if prompt:
            chat.type(prompt)
            chat.until("1 2 3")
        chat.process.terminate()
        assert chat.process.wait(PATIENCE_S) == 143
        assert "Traceback" not in chat.rest() and "Error" not in chat.text


def leave(shell: Shell, *args: str) -> None:
    """Read a letter and close the pipe: the command ends without a word."""
    process = subprocess.Popen(
        [*CLI, *args], env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 141


def test_a_reader_that_leaves_ends_a_chat_quietly(slow: Running, shell: Shell) -> None:
    leave(shell, "chat", "--url", slow.url, "-p", "tell me everything", "--max-tokens", "60000")


def test_a_reader_that_leaves_ends_a_watch_quietly(demo: Shell) -> None:
    leave(demo, "status", "--watch")


def test_piped_input_that_is_not_utf8_is_refused_with_the_place(demo: Shell) -> None:
    done = subprocess.run(
        [*CLI, "chat"],
        env=demo.env | {"PYTHONUTF8": "1"},
        input=b"word " * 200 + b"f\xfcr mich",
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith(b"is not valid UTF-8\n") and b"f\\udcfcr mich" in done.stderr
    assert len(done.stderr) < 200


CURSOR_POSITION = "\x1b[6n"
PASTE = b"\x1b[200~"
PASTED = b"\x1b[201~"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = " ".join(f"word{n}" for n in range(40))
CODE = "Look:\n```python\nimport os\n```\ndone"
ENDLESS = "the same again, " * 400
SCRIPT = [
    {"when": "one\ntwo\nthree", "say": "three lines came"},
    {"when": "code", "say": CODE},
    {"when": "long", "say": LONG},
    {"when": "think", "say": "a **bold** word", "think": "I think first."},
    {"when": "endless", "say": ENDLESS},
    {"when": ".", "say": "a single line came"},
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose answers depend on the prompt."""
    with playing(tmp_path_factory.mktemp("scripted"), SCRIPT, 65536) as found:
        yield found


@pytest.mark.parametrize(
    "keys",
    [
        PASTE + b"one\rtwo\rthree" + PASTED + b"\r",
        b"one\x1b\rtwo\x1b\rthree\r",
        b'"""one\rtwo\rthree"""\r',
        b'"""\rone\rtwo\rthree\r"""\r',
    ],
    ids=["bracketed paste", "alt-enter", "quotes", "quotes on lines of their own"],
)
def test_several_lines_are_one_prompt(scripted: Running, shell: Shell, keys: bytes) -> None:
    n_before = len(scripted.service.request_log.requests())
    chat = Terminal(shell, "chat", "--url", scripted.url, **XTERM)
    chat.until(chat.prompt)
    chat.press(keys)
    assert "three lines came" in chat.until("tok/s]")
    assert chat.close() == 0
    assert len(scripted.service.request_log.requests()) == n_before + 1


def test_edit_opens_the_editor(scripted: Running, shell: Shell) -> None:
    editor = shell.folder / "editor"
    editor.write_text("#!/bin/sh\nprintf 'one\\ntwo\\nthree\\n' > \"$1\"\n")
    editor.chmod(0o755)
    chat = Terminal(shell, "chat", "--url", scripted.url, EDITOR=str(editor), VISUAL="", **XTERM)
    chat.until(chat.prompt)
    chat.type("/edit")
    assert "three lines came" in chat.until("tok/s]")
    assert chat.close() == 0


def test_words_wrap_at_the_margin(scripted: Running, shell: Shell) -> None:
    chat = Terminal(shell, "chat", "--url", scripted.url, COLUMNS="40", **XTERM)
    chat.until(chat.prompt)
    chat.type("long")
    lines = ESCAPES.sub("", chat.until("tok/s]")).splitlines()
    assert chat.close() == 0
    # An unfinished paragraph is drawn several times, the finished one last.
    begin = max(n for n, line in enumerate(lines) if "word0" in line)
    answer = [line for line in lines[begin:] if "word" in line]
    assert max(map(len, lines)) <= 40 and len(answer) > 5
    assert " ".join(" ".join(answer).split()) == LONG


def test_code_has_colors_in_a_terminal_and_none_in_a_pipe(scripted: Running, shell: Shell) -> None:
    chat = Terminal(shell, "chat", "--url", scripted.url, **XTERM)
    chat.until(chat.prompt)
    chat.type("code")
    shown = chat.until("tok/s]")
    assert chat.close() == 0
    assert re.search(r"\x1b\[[0-9;]+mimport\x1b", shown)
    assert "import os" in ESCAPES.sub("", shown)
    plain = shell.run("chat", "--url", scripted.url, "-p", "code")
    assert plain.stdout == f"{CODE}\n"


def test_the_terminal_is_asked_nothing_that_it_may_not_answer(
    scripted: Running, shell: Shell
) -> None:
    chat = Terminal(shell, "chat", "--url", scripted.url, **XTERM)
    shown = chat.until(chat.prompt)
    chat.type("/help")
    shown += chat.until("A paste is one prompt.") + chat.until(chat.prompt)
    chat.press(b"\x04")
    assert CURSOR_POSITION not in shown + chat.rest()
    assert chat.process.wait(PATIENCE_S) == 0


def test_thoughts_stand_before_the_rendered_answer(scripted: Running, shell: Shell) -> None:
    chat = Terminal(shell, "chat", "--url", scripted.url, **XTERM)
    chat.until(chat.prompt)
    chat.type("think")
    shown = ESCAPES.sub("", chat.until("tok/s]"))
    assert chat.close() == 0
    thought, mark, answer = shown.partition("</think>")
    assert "<think>" in thought and "I think first." in thought and mark
    assert "a bold word" in answer and "**" not in answer
    plain = shell.run("chat", "--url", scripted.url, "-p", "think").stdout
    assert plain.endswith("</think>\na **bold** word\n")


def test_an_answer_that_repeats_itself_ends_with_a_remark(scripted: Running, shell: Shell) -> None:
    done = shell.run("chat", "--url", scripted.url, "-p", "endless", "--max-tokens", "60000")
    assert done.returncode == 0, done.stderr
    assert re.search(r"tok/s; ended repetition: answer: \d+ tokens, .* ask again", done.stderr)
    assert len(done.stdout) < len(ENDLESS)


def test_an_answer_is_bounded(scripted: Running, shell: Shell) -> None:
    done = shell.run("chat", "--url", scripted.url, "-p", "long", "--max-tokens", "7")
    assert "7 tokens generated" in done.stderr
    assert "cut there, --max-tokens N allows more" in done.stderr


def test_an_unknown_command_is_named_with_the_nearest(scripted: Running, shell: Shell) -> None:
    chat = Terminal(shell, "chat", "--url", scripted.url)
    chat.until(chat.prompt)
    for typed, told in (
        ("/clear", "unknown: /clear; did you mean /new?"),
        ("/hepl", "unknown: /hepl; did you mean /help?"),
        ("/model", "unknown: /model; /help lists commands"),
        ("/agent", "/agent needs NAME"),
        ("/etc/hosts holds what?", "a single line came"),
    ):
        chat.type(typed)
        chat.until(told)
    assert chat.close() == 0
