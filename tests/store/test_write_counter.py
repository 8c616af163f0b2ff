"""Bytes written by day, and the daily limit of KV, in any order of writes, crashes and restarts."""

import logging
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxstack.core.errors import DiskFull, StackError
from mlxstack.core.preset import DiskSpec
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.files import write_atomic
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.write_counter import MAX_DAYS, CountedDisk, WriteCounter, WriteKind
from tests.store.kv_files import IDENTITY, small_blob

DAY_S = 86_400.0
NOON = time.mktime((2026, 11, 29, 12, 0, 0, 0, 0, -1))
NOBODY: frozenset[tuple[str, str]] = frozenset()


class Crash(BaseException):
    """The process ends here."""


class CrashingDisk(CountedDisk):
    """Counts the bytes that it writes itself, and ends the process after `n_left` more."""

    def __init__(self, counter: WriteCounter, kind: WriteKind = WriteKind.KV) -> None:
        super().__init__(counter, kind)
        self.n_written = 0
        self.n_left: int | None = None

    def write(self, fd: int, data: memoryview) -> int:
        if self.n_left is not None:
            if not self.n_left:
                raise Crash
            data = data[: self.n_left]
        n_done = super().write(fd, data)
        self.n_written += n_done
        if self.n_left is not None:
            self.n_left -= n_done
        return n_done


def counter_of(path: Path, at: float = NOON, max_bytes: int | None = None) -> WriteCounter:
    counter = WriteCounter(path / "writes.sqlite3", lambda: at)
    counter.max_bytes = max_bytes
    return counter


def test_bytes_are_counted_by_day_and_kind_for_all_processes_of_a_home(tmp_path: Path) -> None:
    first, second = counter_of(tmp_path), counter_of(tmp_path)
    first.admit(WriteKind.KV, 100)
    second.admit(WriteKind.KV, 50)
    second.admit(WriteKind.AGENTS, 7)
    counter_of(tmp_path, NOON + DAY_S).admit(WriteKind.AGENTS, 1)
    today = first.today()
    assert (today.kv_bytes, today.n_bytes) == (150, 157)
    assert [day.day for day in first.days()] == ["2026-11-30", "2026-11-29"]


def test_kv_beyond_the_daily_limit_is_refused_and_histories_are_not(tmp_path: Path) -> None:
    counter = counter_of(tmp_path, max_bytes=100)
    counter.admit(WriteKind.KV, 60)
    assert not counter.trouble
    with pytest.raises(DiskFull, match=r"daily_write_bytes .* is used up"):
        counter.admit(WriteKind.KV, 41)
    assert "computed again" in counter.trouble
    counter.admit(WriteKind.AGENTS, 1000)
    counter.admit(WriteKind.KV, 40)
    assert counter.today().kv_bytes == 100


def test_a_new_day_ends_the_effect_of_the_limit(tmp_path: Path) -> None:
    moments = [NOON]
    counter = WriteCounter(tmp_path / "writes.sqlite3", lambda: moments[-1])
    counter.max_bytes = 10
    with pytest.raises(DiskFull):
        counter.check(11)
    moments.append(NOON + DAY_S)
    assert not counter.trouble
    counter.admit(WriteKind.KV, 10)


def test_a_save_beyond_the_daily_limit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    disk = CrashingDisk(counter_of(tmp_path, max_bytes=1))
    store = DiskKVStore(tmp_path / "kv", disk)
    quota = QuotaKVStore(store, AgentFolders(tmp_path / "agents"), DiskSpec())
    with pytest.raises(DiskFull):
        quota.make_room(2, NOBODY)
    with pytest.raises(DiskFull):
        store.write(small_blob())
    assert not disk.n_written
    assert not list(store.entries())


def test_old_days_are_forgotten(tmp_path: Path) -> None:
    counter_of(tmp_path, NOON - (MAX_DAYS + 1) * DAY_S).admit(WriteKind.KV, 1)
    counter_of(tmp_path).admit(WriteKind.KV, 2)
    assert [day.n_bytes for day in counter_of(tmp_path).days()] == [2]


def test_a_damaged_counter_is_moved_aside_and_a_new_one_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "writes.sqlite3").write_bytes(b"no database" * 1000)
    counter = counter_of(tmp_path)
    with caplog.at_level(logging.ERROR):
        assert not counter.days()
    counter.admit(WriteKind.KV, 5)
    assert counter.today().kv_bytes == 5
    assert "is damaged" in caplog.text
    (aside,) = tmp_path.glob("writes.sqlite3.damaged-*")
    assert aside.read_bytes().startswith(b"no database")


def test_a_file_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    counter = counter_of(tmp_path)
    counter.admit(WriteKind.KV, 5)
    counter._database.run(lambda c: c.execute("PRAGMA user_version = 9"))
    counter.close()
    newer = counter_of(tmp_path, max_bytes=100)
    with pytest.raises(StackError, match="another release"):
        newer.admit(WriteKind.KV, 5)
    newer.max_bytes = None
    newer.admit(WriteKind.KV, 5)
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_second_connection_of_a_process_leaves_the_side_files_to_the_first(
    tmp_path: Path,
) -> None:
    """To close a descriptor of the file would end the locks that SQLite holds in this process."""
    counter = counter_of(tmp_path)
    counter.admit(WriteKind.KV, 1)
    counter.days()
    counter.admit(WriteKind.KV, 1)
    assert (tmp_path / "writes.sqlite3-wal").stat().st_size > 0
    assert (tmp_path / "writes.sqlite3").stat().st_mode & 0o777 == 0o600


class LimitMachine(RuleBasedStateMachine):
    """A store with a daily limit; each crash leaves the files as they are on the disk."""

    limit = 1500

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="counter-"))
        self.n_lives = 0
        self.now = NOON
        self.written: dict[str, int] = {}
        self.n_text = 0
        self.begin()

    def begin(self) -> None:
        """Start a process over a copy of the files, as a killed one leaves them."""
        self.n_lives += 1
        home = self.root / str(self.n_lives)
        if self.n_lives > 1:
            shutil.copytree(self.root / str(self.n_lives - 1), home)
            (home / "writes.sqlite3-shm").unlink(missing_ok=True)
        else:
            home.mkdir()
        self.home = home
        self.counter = WriteCounter(home / "writes.sqlite3", lambda: self.now)
        self.counter.max_bytes = self.limit
        self.disk = CrashingDisk(self.counter)
        self.text = CrashingDisk(self.counter, WriteKind.AGENTS)
        self.store = DiskKVStore(home / "kv", self.disk)
        folders = AgentFolders(home / "agents")
        self.quota = QuotaKVStore(self.store, folders, DiskSpec(max_bytes=None))

    def _count(self) -> None:
        day = self.counter.today().day
        self.written[day] = self.written.get(day, 0) + self.disk.n_written
        self.disk.n_written = 0

    @rule(
        key=st.sampled_from("abcdefgh"), n_bytes=st.integers(0, 400), crash=st.none() | st.just(1)
    )
    def write(self, key: str, n_bytes: int, crash: int | None) -> None:
        """Write a file; a crash comes after its first byte."""
        self.disk.n_left = crash
        file = small_blob(2 * key, b"\x00\x01" * n_bytes)
        is_killed = False
        try:
            self.quota.make_room(2 * n_bytes, NOBODY)
            self.store.write(file)
            assert self.store.read(IDENTITY, 2 * key).identity == IDENTITY
        except DiskFull:
            assert self.counter.trouble
        except Crash:
            is_killed = True
        self._count()
        if is_killed:
            self.begin()

    @rule(n_bytes=st.integers(1, 5000))
    def write_history(self, n_bytes: int) -> None:
        write_atomic(self.home / "history.json", [b"t" * n_bytes], self.text)

    @rule()
    def restart(self) -> None:
        self.counter.close()
        self.begin()

    @rule()
    def kill(self) -> None:
        self.begin()

    @rule()
    def next_day(self) -> None:
        self.now += DAY_S

    @invariant()
    def no_day_exceeds_the_limit_and_none_is_counted_too_low(self) -> None:
        counted = {day.day: day for day in self.counter.days()}
        for day, n_bytes in self.written.items():
            kv_bytes = counted[day].kv_bytes if day in counted else 0
            assert n_bytes <= kv_bytes <= self.limit

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


LimitMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestLimit = LimitMachine.TestCase
