"""Backup and restore: `up` from a copy of a home, and what a copy of a running home may not do."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net]

FIRST = (
    " ".join(f"Remember hive {n}: it stands near the old mill." for n in range(12)) + " Say hello."
)
NEXT = "What did I say about the house and the mill?"


def say(url: str, turns: list[dict[str, str]]) -> tuple[str, int]:
    """Answer to a conversation of the agent, and reused tokens of the prompt."""
    body = {"messages": turns, "max_tokens": 16, "temperature": 0, "agent": "ann"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], n_cached


def url_of(shell: Shell) -> str:
    return str(shell.services()["tiny"]["url"])


def restored(shell: Shell, home: Path) -> Shell:
    """A terminal whose home is a copy of another one's."""
    other = Shell(home.parent)
    del other.env["MLX_STACK_WORKER"]
    other.home = home
    other.env["MLX_STACK_HOME"] = str(home)
    other.env["MLX_STACK_SERVER_PORT"] = str(unused_port())
    other.preset = shell.preset
    return other


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, str]]:
    """A stopped service, and the answer that the agent got from it."""
    shell = Shell(tmp_path_factory.mktemp("first"))
    del shell.env["MLX_STACK_WORKER"]
    assert shell.up().returncode == 0
    answer, _ = say(url_of(shell), [{"role": "user", "content": FIRST}])
    assert shell.run("down").returncode == 0
    yield shell, answer
    shell.kill()


def copy_by_cp(home: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(home), str(target)], check=True)


def copy_by_tar(home: Path, target: Path) -> None:
    tarball = target.with_suffix(".tar.gz")
    subprocess.run(["tar", "-czf", tarball, "-C", home.parent, home.name], check=True)
    target.mkdir()
    command = ["tar", "-xzf", tarball, "-C", target, "--strip-components=1"]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("copy", [copy_by_cp, copy_by_tar])
def test_an_agent_goes_on_in_a_copy_of_its_home(
    stopped: tuple[Shell, str], tmp_path: Path, copy: Callable[[Path, Path], None]
) -> None:
    first, answer = stopped
    copy(first.home, tmp_path / "restored")
    shell = restored(first, tmp_path / "restored")
    try:
        up = shell.up()
        assert up.returncode == 0, up.stderr
        turns = [
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": NEXT},
        ]
        _, n_cached = say(url_of(shell), turns)
        assert n_cached > 200, "the first turn is computed again"
        history = shell.run("agents", "history", "ann")
        assert "Remember hive 11" in history.stdout and NEXT in history.stdout, history.stderr
    finally:
        shell.run("down")
        shell.kill()


def test_a_copy_of_a_running_home_leaves_its_services_alone(shell: Shell, tmp_path: Path) -> None:
    assert shell.up().returncode == 0
    shutil.copytree(shell.home, tmp_path / "copy" / "home")
    other = restored(shell, tmp_path / "copy" / "home")
    assert other.services() == {}
    down = other.run("down")
    assert "nothing" in (down.stdout + down.stderr), down
    named = other.run("down", "tiny")
    assert named.returncode == 3, named.stderr
    assert shell.services()["tiny"]["state"] == "healthy", "a copy stopped the original"
    up = other.up()
    assert up.returncode == 0, up.stderr
    assert url_of(other) != url_of(shell)
    other.kill()
