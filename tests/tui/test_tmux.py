"""The dashboard in tmux over SSH as people use it: a real service, real keys, a real screen."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S, wait_until
from tests.tui.pane import Pane

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

AGENTS = ("ann", "bob", "cyd", "dan", "eve")
ROW = re.compile(r"^ +\d  +(\w+) +writing, .* (\d[\d.]*k?) +\d+%", re.M)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Shell]:
    """`mlx-stack up demo` in a home of its own."""
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    (shell.home / "presets").mkdir(parents=True, mode=0o700)
    (shell.home / "presets" / "other.yaml").write_text("extends: demo\nslots: {count: 2}\n")
    started = shell.run("up", "demo", "--set", f"server.port={shell.port}")
    assert started.returncode == 0, started.stderr
    yield shell
    shell.run("down")
    shell.kill()


@pytest.fixture
def pane(demo: Shell, tmp_path: Path) -> Iterator[Pane]:
    """`mlx-stack tui`, attached."""
    # The size is the terminal's, not that of the variables.
    env = {k: v for k, v in demo.env.items() if k not in {"COLUMNS", "LINES"}}
    found = Pane(tmp_path, [*CLI, "tui"], env)
    yield found
    found.close()


class Talk(threading.Thread):
    """An agent who is answered at length, until it is enough."""

    def __init__(self, port: int, agent: str) -> None:
        super().__init__()
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._agent = agent
        self._is_enough = threading.Event()
        self.start()

    def run(self) -> None:
        """Leaving the stream ends the generation."""
        body = {
            "messages": [{"role": "user", "content": f"I am {self._agent}. Tell me a story."}],
            "max_tokens": 3900,
            "ignore_eos": True,
            "stream": True,
            "session_id": self._agent,
        }
        with (
            httpx.Client(timeout=PATIENCE_S) as http,
            http.stream("POST", self._url, json=body) as answer,
        ):
            for _ in answer.iter_lines():
                if self._is_enough.is_set():
                    return

    def end(self) -> None:
        self._is_enough.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()


def moving(seen: str) -> dict[str, str]:
    """The tokens of every running slot, by its agent."""
    return dict(ROW.findall(seen))


def answer_file(pane: Pane, key: str, question: str, name: str) -> None:
    """Press a key, and answer its question."""
    pane.press(key)
    pane.shows(question)
    is_alone = re.compile(rf"[^\w.-]{re.escape(name)}[^\w.-]").search

    def is_written() -> bool:
        # A key that comes before the line has the focus is lost.
        pane.press("C-u")
        pane.write(name)
        return bool(is_alone(pane.text()))

    wait_until(is_written)
    pane.press("Enter")


def test_h1_to_h5_in_tmux_slots_move_a_save_writes_and_a_restart_is_survived(
    demo: Shell, pane: Pane
) -> None:
    pane.shows("0 of 3 busy")
    see_slots_move(demo, pane)
    pane.press("Down")
    answer_file(pane, "S", "to which file?", "kept.kv")
    pane.until(lambda seen: re.search(r"saved\W+to\W+kept.kv", seen) is not None, "the deed")
    assert len(list(demo.home.glob("slots/**/kept.kv*"))) == 1

    os.kill(demo.services()["demo"]["worker_pid"], signal.SIGKILL)
    lost = pane.shows("Disconnected")
    assert any(agent in lost for agent in AGENTS), "what was last known stays"
    signs = ("ok · demo", "empty")
    pane.until(lambda seen: all(sign in seen for sign in signs), "the service with empty slots")
    assert "Disconnected" not in pane.text()

    answer_file(pane, "R", "by which file?", "kept.kv")
    pane.until(lambda seen: re.search(r"^ +1 .* idle ", seen, re.M) is not None, "the context")

    pane.press("E")
    pane.shows("must be computed again")
    pane.press("y")
    pane.until(lambda seen: re.search(r"^ +1 .* empty ", seen, re.M) is not None, "an empty slot")
    answer_file(pane, "m", "Serve which preset", "other")
    pane.shows("0 of 2 busy")
    assert demo.services()["demo"]["n_slots"] == 2
    pane.press("q")
    pane.ended()
    assert demo.services()["demo"]["state"] == "healthy"


def see_slots_move(demo: Shell, pane: Pane) -> None:
    """Three of five agents decode, two wait: nobody presses a key, and every slot counts on."""
    talks = [Talk(demo.port, agent) for agent in AGENTS]
    first = pane.until(
        lambda seen: len(moving(seen)) == 3 and "a free slot, 1 ahead" in seen,
        "three running slots and two waiting agents",
    )
    began = moving(first)
    pane.until(
        lambda seen: all(moving(seen).get(agent) not in {None, began[agent]} for agent in began),
        "all three slots having moved",
    )
    for talk in talks:
        talk.end()
    pane.until(
        lambda seen: (
            "0 of 3 busy" in seen and len(re.findall(r"^ +\d  +\w+ +idle", seen, re.M)) == 3
        ),
        "three idle slots",
    )
