"""Log of a service: rotation, tail and follow."""

import io
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 10 * 1024 * 1024
N_KEPT = 5
BLOCK_BYTES = 8192


class RotatingLog:
    """A rotating log file, with the last lines at hand."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._file = RotatingFileHandler(
            path, maxBytes=max_bytes, backupCount=N_KEPT, encoding="utf-8"
        )
        self._file.setFormatter(logging.Formatter("%(message)s"))
        self.last_lines: deque[str] = deque(maxlen=400)

    def write(self, line: str) -> None:
        """Add one line, without its newline."""
        self.last_lines.append(line)
        self._file.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        self._file.close()


def rotate(path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Rotate a log to `.1` when it exceeds `max_bytes`.

    The file itself stays, because launchd and systemd have it open and append to it.
    """
    if path.exists() and path.stat().st_size > max_bytes:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


def tail(path: Path, n_lines: int) -> list[str]:
    """Last `n_lines` lines, rotated files included."""
    lines: list[str] = []
    for file in [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, N_KEPT + 1))]:
        if len(lines) >= n_lines or not file.exists():
            break
        lines = [*_last_lines(file, n_lines - len(lines)), *lines]
    return lines


def _last_lines(path: Path, n_lines: int) -> list[str]:
    """Last lines, read from the end, whatever the log's length."""
    with path.open("rb") as file:
        n_all = file.seek(0, os.SEEK_END)
        n_bytes = BLOCK_BYTES
        end = b""
        while len(end) < n_all and end.count(b"\n") <= n_lines:
            file.seek(max(0, n_all - n_bytes))
            end = file.read(n_bytes)
            n_bytes = 2 * n_bytes
    text = io.TextIOWrapper(io.BytesIO(end), encoding="utf-8", errors="replace")
    return [line.rstrip("\n") for line in text][-n_lines:]


def follow(path: Path, wait: Callable[[], None]) -> Iterator[str]:
    """Follow new lines for ever; `wait` passes the time between.

    When the file is rotated, the rest of the old one comes first.
    """
    position = 0
    inode = 0
    if path.exists():
        position = path.stat().st_size
        inode = path.stat().st_ino
    while True:
        wait()
        if not path.exists():
            continue
        now = path.stat()
        if now.st_ino != inode:
            old = path.with_name(f"{path.name}.1")
            if old.exists() and old.stat().st_ino == inode:
                yield from (line for line, _ in _lines_from(old, position))
            position = 0
            inode = now.st_ino
        for line, end in _lines_from(path, position):
            position = end
            yield line


def _lines_from(path: Path, position: int) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield line.rstrip(b"\n").decode(errors="replace"), position
