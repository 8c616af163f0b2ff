"""The background writer: bounded, never blocking the caller, never dying."""

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, get_ident

import pytest

from mlxstack.core.errors import Busy, Conflict, Damaged, StackError
from mlxstack.store.background_writer import BackgroundWriter
from mlxstack.store.kv_store import DiskKVStore
from tests.patience import PATIENCE_S
from tests.store.bad_disks import FullDisk
from tests.store.kv_files import IDENTITY, KEY, small_blob


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(3, 1000)
    yield writer
    writer.close()


@pytest.fixture
def gate() -> Iterator[Event]:
    gate = Event()
    yield gate
    gate.set()


def test_g12_a_blob_is_written_behind_the_callers_back(
    writer: BackgroundWriter, tmp_path: Path
) -> None:
    vault = DiskKVStore(tmp_path)
    n_bytes = writer.submit(lambda: vault.write(small_blob())).result(PATIENCE_S)
    assert [entry.n_bytes for entry in vault.entries()] == [n_bytes]
    assert vault.read(IDENTITY, KEY) == small_blob()
    assert writer.submit(lambda: vault.write(small_blob())).result(PATIENCE_S) == 0


def test_jobs_run_in_order_on_one_other_thread() -> None:
    writer = BackgroundWriter()
    seen: list[tuple[int, int]] = []
    for number in range(20):
        writer.submit(lambda number=number: seen.append((number, get_ident())))
    assert writer.drain(10)
    assert [number for number, _ in seen] == list(range(20))
    assert {thread for _, thread in seen} != {get_ident()}
    assert len({thread for _, thread in seen}) == 1
    writer.close()


def test_g12_beyond_the_bound_of_bytes_it_is_busy_at_once(
    writer: BackgroundWriter, gate: Event
) -> None:
    writer.submit(gate.wait, 600)
    writer.submit(gate.wait, 400)
    with pytest.raises(Busy, match="2 writes of 1000 bytes wait"):
        writer.submit(gate.wait, 1)
    gate.set()
    assert writer.drain(10)
    assert writer.submit(lambda: 5, 1000).result(PATIENCE_S) == 5


def test_g12_beyond_the_bound_of_jobs_it_is_busy_at_once(
    writer: BackgroundWriter, gate: Event
) -> None:
    for _ in range(3):
        writer.submit(gate.wait)
    with pytest.raises(Busy, match="3 writes"):
        writer.submit(gate.wait)


def test_a_giant_is_taken_when_nothing_waits(writer: BackgroundWriter, gate: Event) -> None:
    writer.submit(gate.wait, 5000)
    with pytest.raises(Busy):
        writer.submit(gate.wait, 5000)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (OSError(errno.EROFS, "x"), "read-only"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (Damaged("it is broken"), "it is broken"),
    ],
)
def test_g12_a_failure_is_told_in_words_and_the_thread_lives(
    writer: BackgroundWriter, error: Exception, text: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(StackError, match=text) as told:
        writer.submit(fail, 10).result(PATIENCE_S)
    assert told.value.__cause__ is not told.value
    assert writer.submit(lambda: "alive").result(PATIENCE_S) == "alive"
    assert writer.drain(0)


def test_g12_a_full_disk_fails_one_blob(writer: BackgroundWriter, tmp_path: Path) -> None:
    full = DiskKVStore(tmp_path / "full", FullDisk(100))
    good = DiskKVStore(tmp_path / "good")
    failing = writer.submit(lambda: full.write(small_blob()))
    fine = writer.submit(lambda: good.write(small_blob()))
    with pytest.raises(StackError, match="the disk is full"):
        failing.result(PATIENCE_S)
    assert fine.result(PATIENCE_S) > 0


def test_a_cancelled_job_is_forgotten(writer: BackgroundWriter, gate: Event) -> None:
    writer.submit(gate.wait, 10)
    waiting = writer.submit(lambda: 1, 500)
    assert waiting.cancel()
    writer.submit(lambda: 2, 990)
    gate.set()
    assert writer.drain(10)


def test_every_job_that_ends_eases_the_writer(gate: Event) -> None:
    eased: list[int] = []
    writer = BackgroundWriter(1, eased=lambda: eased.append(1))
    writer.submit(gate.wait)
    assert not eased
    gate.set()
    assert writer.drain(10)
    writer.close()
    assert eased == [1]


def test_draining_gives_up_in_time(writer: BackgroundWriter, gate: Event) -> None:
    writer.submit(gate.wait)
    assert not writer.drain(0.01)


def test_closing_finishes_what_waits_and_takes_no_more(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    vault = DiskKVStore(tmp_path)
    blobs = [small_blob(f"{number:04x}") for number in range(10)]
    futures = [writer.submit(partial(vault.write, blob)) for blob in blobs]
    writer.close()
    assert all(future.done() for future in futures)
    assert len(list(vault.entries())) == 10
    with pytest.raises(Conflict, match="stopping"):
        writer.submit(lambda: 1)
    writer.close()
