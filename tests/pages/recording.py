"""The recording of docs/tui.md, as an asciinema cast: a second agent starts, its prompt is known.

`make shots` runs this, on a real service and a real terminal.
"""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import httpx

from tests.cli.terminal import CLI, Shell

CAST = Path(__file__).parents[2] / "docs" / "img" / "second-agent.cast"
COLUMNS = 112
LINES = 30
MIN_REUSED = 0.95
MAX_STEP_S = 60.0
PAUSE_S = 1.5
RULES = "\n".join(
    f"{i}. Read a file before you change it, run its tests after, and say what you did."
    for i in range(1, 81)
)
AGENTS = (
    ("shop-api", "Why does the cart forget its items?"),
    ("shop-web", "Make the search box wider."),
)


class Terminal:
    """A program on a pseudo-terminal; `events` are what it wrote, and when."""

    def __init__(self, command: tuple[str, ...], env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self._began = time.monotonic()
        self.events: list[tuple[float, str]] = []

    def watch(self, seconds: float) -> None:
        """Note its output for this long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left)[0]:
                text = os.read(self._ours, 65536).decode(errors="replace")
                self.events.append((round(time.monotonic() - self._began, 3), text))

    def until(self, is_so: "threading.Event | str") -> None:
        """Note its output until an event is set, or these words were written."""
        deadline = time.monotonic() + MAX_STEP_S
        first = len(self.events)
        while not (
            any(is_so in text for _, text in self.events[first:])
            if isinstance(is_so, str)
            else is_so.is_set()
        ):
            if time.monotonic() > deadline:
                raise SystemExit(f"never seen: {is_so}")
            self.watch(0.1)

    def leave(self) -> None:
        """Press q."""
        os.write(self._ours, b"q")
        self._process.wait(MAX_STEP_S)
        os.close(self._ours)


def ask(url: str, folder: str, text: str, answers: list[httpx.Response]) -> None:
    """One request of a client as Claude Code sends it."""
    rules = f"You are Claude Code.\n{RULES}\nWorking directory: /src/{folder}"
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 40, "ignore_eos": True}
    answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=MAX_STEP_S))


def session(url: str, terminal: Terminal) -> list[httpx.Response]:
    """Both agents, one after the other."""
    answers: list[httpx.Response] = []
    terminal.until("busy")
    terminal.watch(PAUSE_S)
    for folder, text in AGENTS:
        done = threading.Event()

        def one(folder: str = folder, text: str = text, done: threading.Event = done) -> None:
            ask(url, folder, text, answers)
            done.set()

        threading.Thread(target=one).start()
        terminal.until(done)
        terminal.watch(PAUSE_S)
    return answers


def reused(answer: httpx.Response) -> float:
    """Share of the prompt that was not computed."""
    if answer.is_error:
        raise SystemExit(answer.text)
    n, new = (int(answer.headers[f"x-mlx-stack-cache-{x}-tokens"]) for x in ("prefix", "new"))
    return n / (n + new)


def cast(events: list[tuple[float, str]]) -> str:
    """Version 2 of the format: a header, then a line per piece of output."""
    header = {"version": 2, "width": COLUMNS, "height": LINES, "idle_time_limit": 2.0,
              "title": "mlx-stack tui: a second agent starts"}  # fmt: skip
    lines = [
        json.dumps(header),
        *(json.dumps([at_s, "o", text], ensure_ascii=False) for at_s, text in events),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the recording, if the second agent reused what it should."""
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        del shell.env["MLX_STACK_WORKER"]
        shell.run("up", "demo", "--set", f"server.port={shell.port}").check_returncode()
        try:
            env = {k: v for k, v in shell.env.items() if k not in {"COLUMNS", "LINES", "NO_COLOR"}}
            terminal = Terminal((*CLI, "tui"), {**env, "TERM": "xterm-256color"})
            first, second = session(f"http://127.0.0.1:{shell.port}", terminal)
            terminal.leave()
        finally:
            shell.run("down")
    if not reused(first) < MIN_REUSED <= reused(second):
        raise SystemExit(f"{reused(first):.0%} and {reused(second):.0%} were reused")
    CAST.write_text(cast(terminal.events), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
