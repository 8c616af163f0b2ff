"""The terminal that tests of the command share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in shell.own_processes():
        process.kill()
