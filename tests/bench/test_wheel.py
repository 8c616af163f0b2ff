"""The wheel: what it leaves out, and what its commands say without it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("mlxstack/bench/dev/", "mlxstack/demo/training/")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


def test_developers_code_is_not_in_the_wheel(installed: Path) -> None:
    names = {str(file.relative_to(installed)) for file in installed.rglob("*.py")}
    assert not [name for name in names if name.startswith(LEFT_OUT)]
    for name in LEFT_OUT:
        assert list((ROOT / name).rglob("*.py")), "a checkout has it"
    assert {"mlxstack/bench/my_service.py", "mlxstack/demo/__init__.py"} <= names


def test_a_developers_benchmark_needs_a_checkout(installed: Path) -> None:
    command = [sys.executable, "-m", "mlxstack.cli.main", "bench", "dev", "start", "--small"]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: `mlx-stack bench dev` needs a checkout")
