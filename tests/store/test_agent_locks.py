"""Locks on agents between processes: turns exclude each other, requests do not."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlxstack.core.errors import BadRequest, StackError
from mlxstack.store.agent_history import AgentLockFiles

HOLDER = """
import sys, time
from pathlib import Path
from mlxstack.store.agent_history import AgentLockFiles
held = AgentLockFiles(Path(sys.argv[1])).turn("Bob:1")
print(held is not None, flush=True)
time.sleep(60)
"""


@pytest.fixture
def one(tmp_path: Path) -> AgentLockFiles:
    return AgentLockFiles(tmp_path / "locks")


@pytest.fixture
def other(tmp_path: Path, one: AgentLockFiles) -> AgentLockFiles:
    """The same locks, as another process sees them."""
    return AgentLockFiles(tmp_path / "locks")


def test_a_turn_excludes_turns_and_requests(one: AgentLockFiles, other: AgentLockFiles) -> None:
    held = one.turn("bob")
    assert held is not None
    assert other.turn("bob") is None and other.request("bob") is None
    for free in (other.turn("Bob"), other.history("bob")):
        assert free is not None
        free.release()
    held.release()
    held.release()
    again = other.turn("bob")
    assert again is not None and one.turn("bob") is None
    again.release()


def test_requests_share_and_keep_turns_out(one: AgentLockFiles, other: AgentLockFiles) -> None:
    first = one.request("bob")
    second = other.request("bob")
    assert first is not None and second is not None
    first.release()
    assert one.turn("bob") is None
    second.release()
    with one.turn("bob") or pytest.fail("nothing holds it"):
        assert other.request("bob") is None


def test_a_released_turn_leaves_no_file(one: AgentLockFiles, tmp_path: Path) -> None:
    for acquire in (one.turn, one.history):
        held = acquire("bob")
        assert held is not None
        (file,) = (tmp_path / "locks").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        held.release()
        assert not list((tmp_path / "locks").iterdir())


def test_a_process_that_dies_loses_its_locks(one: AgentLockFiles, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "locks")]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "True\n"
            assert one.turn("Bob:1") is None
        finally:
            holder.kill()
    held = one.turn("Bob:1")
    assert held is not None
    held.release()


def test_impossible_names_and_a_disk_that_refuses(one: AgentLockFiles, tmp_path: Path) -> None:
    with pytest.raises(BadRequest):
        one.turn("../bob")
    (tmp_path / "locks" / "bob.turn").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StackError, match="bob was not locked"):
        one.turn("bob")
    assert not (tmp_path / "elsewhere").exists()
