"""Results of self-checks, one private file each."""

import logging
from pathlib import Path

from mlxstack.core.errors import StackError
from mlxstack.store.files import Disk, write_atomic

log = logging.getLogger(__name__)

SUFFIX = ".check"
MAX_FILES = 200
"""The oldest ones make room."""


class CheckFiles:
    """Results by key.

    Losing one costs a check, so that files are not durable.
    """

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self._folder = folder
        self._disk = disk or Disk()

    def load(self, key: str) -> bytes | None:
        """Bytes of a result; None without one."""
        try:
            return self._file(key).read_bytes()
        except OSError:
            return None

    def save(self, key: str, result: bytes) -> None:
        """Write a result; where the disk refuses, that is logged."""
        try:
            write_atomic(self._file(key), [result], self._disk, is_durable=False)
        except StackError as error:
            log.warning("%s", error)
            return
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"
