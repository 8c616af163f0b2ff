"""KV on disk is left out of Time Machine; `setxattr` of macOS is imitated."""

import ctypes
import errno
import logging
import plistlib
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxstack.store.backup_exclusion import ATTRIBUTE, exclude_from_backups
from mlxstack.store.kv_store import DiskKVStore


class SetAttribute:
    """`setxattr` of macOS, which has two more arguments than that of Linux."""

    argtypes: Any = None

    def __init__(self, error: int) -> None:
        self.calls: list[tuple[str, bytes, bytes]] = []
        self._error = error

    def __call__(self, path: bytes, name: bytes, value: bytes, size: int, *zeros: int) -> int:
        assert len(value) == size and zeros == (0, 0)
        self.calls.append((path.decode(), name, value))
        ctypes.set_errno(self._error)
        return -1 if self._error else 0


class Darwin:
    """The C library of macOS, with the one function."""

    def __init__(self, error: int = 0) -> None:
        self.setxattr = SetAttribute(error)


@pytest.fixture
def darwin(monkeypatch: pytest.MonkeyPatch) -> Darwin:
    library = Darwin()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    return library


@pytest.mark.parametrize("is_old", [False, True], ids=["new", "of an earlier version"])
def test_a_folder_of_kv_is_excluded(
    tmp_path: Path, darwin: Darwin, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    if is_old:
        (tmp_path / "kv").mkdir()
    DiskKVStore(tmp_path / "kv")
    ((path, name, value),) = darwin.setxattr.calls
    assert path == str(tmp_path / "kv")
    assert name == ATTRIBUTE == b"com.apple.metadata:com_apple_backup_excludeItem"
    assert plistlib.loads(value) == "com.apple.backupd"


def test_other_systems_set_no_attribute(tmp_path: Path, darwin: Darwin) -> None:
    exclude_from_backups(tmp_path, "linux")
    assert darwin.setxattr.calls == []


def test_a_volume_without_attributes_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Darwin(errno.ENOTSUP))
    with caplog.at_level(logging.INFO):
        exclude_from_backups(tmp_path, "darwin")
    assert f"Time Machine backs up {tmp_path}" in caplog.text
