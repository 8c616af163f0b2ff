"""The terminal that tests of the command share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Shell


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A terminal with one service for the tests of a file, which leave it as it is."""
    shell = Shell(tmp_path_factory.mktemp("served"))
    up = shell.up()
    assert up.returncode == 0, up.stderr
    yield shell
    shell.run("down")
    shell.kill()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.kill()
