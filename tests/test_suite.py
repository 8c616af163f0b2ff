"""A test that fails once is told as flaky; one that fails twice fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
from pathlib import Path

def test_passes():
    pass

def test_fails_the_first_time():
    mark = Path(__file__).with_name("ran")
    ran = mark.exists()
    mark.touch()
    assert ran
"""
BROKEN = """
def test_fails_always():
    assert False
"""
MANY = """
import pytest

@pytest.mark.parametrize("n", range(6))
def test_fails(n):
    assert False
"""


def suite(folder: Path, *options: str) -> tuple[int, str, str]:
    """Run the tests of a folder as `make suite` does: exit code, output, flaky tests."""
    code = (
        "import sys; from pathlib import Path; from tests import suite;"
        "sys.exit(suite.run(sys.argv[2:], Path(sys.argv[1])))"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    flaky = folder / "flaky"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(flaky), *options],
        cwd=folder,
        # Most of a start is the import of plugins.
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"PYTEST_PLUGINS": "xdist.plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, flaky.read_text() if flaky.exists() else ""


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_test_that_passes_alone_is_flaky(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    code, output, flaky = suite(tmp_path, *options)
    assert code == 0, output
    assert "test_fails_the_first_time failed, and passed alone" in flaky
    assert flaky.count("\n") == 1


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS + BROKEN)
    code, output, flaky = suite(tmp_path)
    assert code == 1, output
    assert "test_fails_always" not in flaky


def test_many_failures_are_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(MANY)
    code, output, flaky = suite(tmp_path)
    assert code == 1
    assert "again, alone" not in output
    assert not flaky
