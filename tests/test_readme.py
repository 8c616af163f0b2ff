"""The walk-through of the README, typed as it stands, by a wheel in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import option
from tests.patience import PATIENCE_S
from tests.ports import unused_port

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through needs curl"),
]


def scenes() -> list[tuple[str, str]]:
    """Every command of the README with the output it promises."""
    parts = []
    for block in BLOCK.findall((ROOT / "README.md").read_text()):
        for scene in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = scene.partition("\n")
            parts.append((command, output.strip()))
    return parts


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `mlx-stack` is: `MLX_STACK_BIN`, else a built wheel beside the packages of this one."""
    if named := option("BIN"):
        return Path(named)
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(root)]
    subprocess.run(build, check=True, capture_output=True, timeout=PATIENCE_S)
    venv.create(root / "env", symlinks=True)
    python = root / "env" / "bin" / "python"
    (wheel,) = root.glob("*.whl")
    install = [*pip, "--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=PATIENCE_S)
    (site,) = (root / "env").glob("lib/python*/site-packages")
    # A path in a .pth file does not bring that folder's own .pth files, so not the editable one.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.fixture
def shell(programs: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    port = str(unused_port())
    env = {**os.environ, "MLX_STACK_HOME": str(tmp_path), "MLX_STACK_SERVER_PORT": port}
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    env.pop("PYTHONPATH", None)
    up = ["mlx-stack", "up", "demo"]
    subprocess.run(up, env=env, check=True, timeout=PATIENCE_S, cwd=tmp_path)
    yield env, port
    subprocess.run(["mlx-stack", "down"], env=env, check=False, timeout=PATIENCE_S, cwd=tmp_path)


def test_the_wheel_holds_the_presets_and_the_demo_model(
    programs: Path, shell: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    ask = "import mlxstack, pathlib; print(pathlib.Path(mlxstack.__file__).parent)"
    done = subprocess.run(
        [programs / "python", "-c", ask],
        check=True,
        env=shell[0],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    house = Path(done.stdout.strip())
    assert house != ROOT / "mlxstack", done.stderr
    for folder, ours in (("presets", ROOT / "presets"), ("demo", ROOT / "mlxstack" / "demo")):
        files = [p.relative_to(ours) for p in ours.rglob("*.*") if "__pycache__" not in str(p)]
        names = {str(file) for file in files if file.parts[0] != "training"}
        assert names
        assert not {name for name in names if not (house / folder / name).exists()}


def test_the_first_three_commands_work_with_the_demo_model(
    shell: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    """Those of the first block, but that the package is here and the model is the demo's."""
    env, _ = shell
    block = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    install, up, run = (line.partition(" #")[0].split() for line in block.splitlines())
    assert install == ["uv", "tool", "install", "."]
    program = tmp_path / "bin" / run[-1]
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho the model is $ANTHROPIC_MODEL\n")
    program.chmod(0o755)
    path = {**env, "PATH": f"{program.parent}{os.pathsep}{env['PATH']}"}
    for args, output in ((up, "demo is already running"), (run, "the model is demo")):
        named = ["demo" if word == up[-1] else word for word in args]
        # The prompts of a coding agent do not fit into the demo's slots.
        more = ["--if-needed"] if args is up else ["--anyway"]
        done = subprocess.run(
            [*named, *more],
            env=path,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        assert output in done.stdout


def test_the_walk_through_is_true(shell: tuple[dict[str, str], str]) -> None:
    env, port = shell
    assert len(scenes()) >= 10
    shutil.copytree(ROOT / "docs" / "img", Path(env["MLX_STACK_HOME"], "docs", "img"))
    for command, promised in scenes():
        done = subprocess.run(
            command.replace("7109", port),
            shell=True,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=env["MLX_STACK_HOME"],
        )
        pattern = re.escape(promised.replace("7109", port)).replace("…", ".*")
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert re.fullmatch(pattern, done.stdout.strip(), re.DOTALL), (
            f"{command}\npromised: {promised}\ncame: {done.stdout}{done.stderr}"
        )


OFFLINE = """
set -e
ip link set lo up
export LD_PRELOAD="$BLAS"
mlx-stack up demo
mlx-stack chat -p "Remember the magic word: offline. Reply with one short sentence."
mlx-stack tui --help
mlx-stack down
"""


def test_the_wheel_needs_no_network_but_loopback(programs: Path, tmp_path: Path) -> None:
    """Outside of any checkout, in a network namespace of its own."""
    inside = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    port = str(unused_port())
    env = {**os.environ, "MLX_STACK_HOME": str(tmp_path / "home"), "MLX_STACK_SERVER_PORT": port}
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    env.pop("PYTHONPATH", None)
    # A library with threads keeps unshare from its new user namespace.
    env["BLAS"] = env.pop("LD_PRELOAD", "")
    try:
        probe = [*inside, "ip link set lo up"]
        subprocess.run(probe, env=env, check=True, timeout=PATIENCE_S, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as why:
        pytest.skip(f"no network namespaces here: {getattr(why, 'stderr', why)}")
    done = subprocess.run(
        [*inside, OFFLINE],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "demo is ready at" in done.stdout and "demo is stopped" in done.stdout
    assert "magic word offline" in done.stdout and "mlx-stack tui" in done.stdout
