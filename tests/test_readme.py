"""The walk-through of the README, typed as it stands, against the real service."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through needs curl"),
]


def scenes() -> list[tuple[str, str]]:
    """Every command of the README with the output it promises."""
    found = []
    for block in BLOCK.findall((ROOT / "README.md").read_text()):
        for scene in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = scene.partition("\n")
            found.append((command, output.strip()))
    return found


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = Path(sys.executable).parent
    env = {**os.environ, "MLX_STACK_HOME": str(tmp_path), "MLX_STACK_SERVER_PORT": port}
    env["PATH"] = f"{here}{os.pathsep}{env['PATH']}"
    subprocess.run(["mlx-stack", "up", "demo"], env=env, check=True, timeout=240)
    yield env, port
    subprocess.run(["mlx-stack", "down"], env=env, check=False, timeout=60)


def test_the_walk_through_is_true(shell: tuple[dict[str, str], str]) -> None:
    env, port = shell
    assert len(scenes()) >= 8
    for command, promised in scenes():
        done = subprocess.run(
            command.replace("7109", port),
            shell=True,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        pattern = re.escape(promised.replace("7109", port)).replace("…", ".*")
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert re.fullmatch(pattern, done.stdout.strip(), re.DOTALL), (
            f"{command}\npromised: {promised}\ncame: {done.stdout}{done.stderr}"
        )
