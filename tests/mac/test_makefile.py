"""`make` with an old Python, as Apple's command line tools have; interpreters are stubs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"

STUB = """#!/bin/sh
case "$1" in
  --version) echo "Python {version}" ;;
  -c) exec "{python}" -c "import sys; sys.version_info = tuple(map(int, '{version}'.split('.')))
$2" ;;
  -m) echo "{version} $*" >> "{log}"
      if [ "$2" = venv ]; then
        mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && {after_python} touch "$4/bin/activate"
      fi ;;
esac
"""
"""An interpreter that tells a version, writes down its modules and makes environments of itself."""

Interpreter = Callable[..., Path]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, and `mlx-stack` of its environment as a stub."""
    root = tmp_path / "clone"
    root.mkdir()
    shutil.copy(MAKEFILE, root)
    (root / "pyproject.toml").touch()
    return root


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    (tmp_path / "bin").mkdir()

    def write(name: str, version: str, after_python: str = "") -> Path:
        path = tmp_path / "bin" / name
        text = STUB.format(
            version=version, python=sys.executable, log=tmp_path / "log", after_python=after_python
        )
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    return write


def make(checkout: Path, *args: str) -> subprocess.CompletedProcess[str]:
    folder = checkout.parent / "bin"
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MAKEFLAGS": ""}
    return subprocess.run(
        ["make", *args], cwd=checkout, env=env, capture_output=True, text=True, check=False
    )


def calls(checkout: Path) -> list[str]:
    """The modules that interpreters ran, each after its version."""
    log = checkout.parent / "log"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


INSTALLED = ".venv/installed"


def test_an_old_python_is_refused_by_its_version_before_an_environment_is_made(
    checkout: Path, interpreter: Interpreter
) -> None:
    interpreter("python3", "3.9.6")
    done = make(checkout, "up")
    assert done.returncode != 0
    assert "python3 is Python 3.9.6; mlx-stack needs Python 3.11 or newer" in done.stderr
    assert "make up PYTHON=python3.12" in done.stderr
    assert not (checkout / ".venv").exists() and not calls(checkout)


def test_an_interpreter_that_is_not_installed_is_named(checkout: Path) -> None:
    done = make(checkout, "up", "PYTHON=python3.77")
    assert done.returncode != 0 and "python3.77 is not installed" in done.stderr


def test_another_python_works_after_a_refused_one(checkout: Path, interpreter: Interpreter) -> None:
    interpreter("python3", "3.9.6")
    interpreter("python3.12", "3.12.1")
    assert make(checkout, INSTALLED).returncode != 0
    done = make(checkout, INSTALLED, "PYTHON=python3.12")
    assert done.returncode == 0, done.stderr
    assert calls(checkout)[0] == "3.12.1 -m venv --clear .venv"
    assert (checkout / INSTALLED).exists()


def test_up_tells_its_steps_while_it_installs(checkout: Path, interpreter: Interpreter) -> None:
    interpreter("python3", "3.12.1")
    done = make(checkout, "up", "PORT=7999")
    steps = [re.fullmatch(r" *\d+ s  (.+)", line) for line in done.stdout.splitlines()]
    assert [step[1] for step in steps if step] == [
        "making .venv with Python 3.12.1",
        "installing mlx-stack and its packages into .venv (about a minute)",
        "compiling the packages",
        "starting the demo at port 7999",
    ]
    again = make(checkout, "up", "PORT=7999").stdout
    assert "starting the demo" in again and "installing" not in again


def test_an_environment_of_an_older_python_is_made_anew(
    checkout: Path, interpreter: Interpreter
) -> None:
    old = interpreter("old", "3.9.6")
    subprocess.run([old, "-m", "venv", "--clear", ".venv"], cwd=checkout, check=True)
    (checkout / INSTALLED).touch()
    interpreter("python3.12", "3.12.1")
    done = make(checkout, INSTALLED, "PYTHON=python3.12")
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in calls(checkout)[1:]][:2] == ["3.12.1", "3.12.1"]


@pytest.mark.parametrize("goals", [(), ("help",)])
def test_help_leaves_an_environment_of_an_older_python(
    checkout: Path, interpreter: Interpreter, goals: tuple[str, ...]
) -> None:
    old = interpreter("old", "3.9.6")
    subprocess.run([old, "-m", "venv", "--clear", ".venv"], cwd=checkout, check=True)
    assert "make up" in make(checkout, *goals).stdout
    assert (checkout / ".venv/bin/activate").exists()


def test_an_environment_whose_python_is_gone_is_made_anew(
    checkout: Path, interpreter: Interpreter
) -> None:
    interpreter("python3", "3.12.1")
    assert make(checkout, INSTALLED).returncode == 0
    (checkout / ".venv/bin/python").unlink()
    assert make(checkout, INSTALLED).returncode == 0
    assert [call for call in calls(checkout) if "-m venv" in call] == [
        "3.12.1 -m venv --clear .venv"
    ] * 2


def test_a_half_made_environment_is_made_anew(checkout: Path, interpreter: Interpreter) -> None:
    interpreter("python3", "3.12.1", after_python="exit 1;")
    assert make(checkout, INSTALLED).returncode != 0
    assert (checkout / ".venv/bin/python").exists()
    interpreter("python3", "3.12.2")
    done = make(checkout, INSTALLED)
    assert done.returncode == 0, done.stderr
    assert "3.12.2 -m venv --clear .venv" in calls(checkout)


def test_a_whole_environment_stays(checkout: Path, interpreter: Interpreter) -> None:
    interpreter("python3", "3.12.1")
    assert make(checkout, INSTALLED).returncode == 0
    before = calls(checkout)
    interpreter("python3", "3.9.6")
    assert make(checkout, INSTALLED).returncode == 0
    assert calls(checkout) == before


def test_further_environments_are_made_by_the_python_of_the_first(
    checkout: Path, interpreter: Interpreter
) -> None:
    (checkout / "tests/clients").mkdir(parents=True)
    (checkout / "tests/clients/requirements.txt").touch()
    interpreter("python3.12", "3.12.1")
    assert make(checkout, INSTALLED, "PYTHON=python3.12").returncode == 0
    interpreter("python3", "3.9.6")
    assert make(checkout, ".venv/clients/ready").returncode == 0
    assert not [call for call in calls(checkout) if call.startswith("3.9")]


def test_venv_writes_its_activate_after_everything_that_it_installs(tmp_path: Path) -> None:
    """The Makefile tells a whole environment by it."""
    code = (
        "import sys, venv; from pathlib import Path\n"
        "class Builder(venv.EnvBuilder):\n"
        "    def _setup_pip(self, context):\n"
        "        assert not (Path(context.bin_path) / 'activate').exists()\n"
        f"Builder(with_pip=True).create({str(tmp_path / 'made')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "made/bin/activate").exists()
