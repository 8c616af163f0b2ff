"""Child of `limited_test`: limits itself, then runs the test.

It imports nothing of this package.
"""

import ctypes
import os
import resource
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

TEST_FILE = "test.py"
CPU_S = 10
MAX_MEMORY = 1 << 30
MAX_FILE = 1 << 20
MAX_FILES = 64
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "os.kill", "os.symlink", "os.link", "pty.", "ctypes.", "shutil.",
)  # fmt: skip
"""Beginnings of audit events that end the test."""
WRITES = frozenset({"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"})


def limit() -> None:
    """Limit CPU time, memory and files, and leave the network where possible."""
    limits = {
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_AS: MAX_MEMORY,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def guard(root: str) -> None:
    """Refuse sockets, processes and writing outside of a folder."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"a test of a repair may not use {event}")
        if event == "open" and not _is_reading(arguments):
            _check_inside(arguments[0], root)
        elif event in WRITES:
            for argument in arguments[: 1 + (event == "os.rename")]:
                _check_inside(argument, root)

    sys.addaudithook(hook)


def _is_reading(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if isinstance(path, int):
        return True
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


def _check_inside(path: Any, root: str) -> None:
    whole = os.path.realpath(os.fsdecode(path))
    if os.path.commonpath((whole, root)) != root:
        raise PermissionError("a test of a repair may write in its folder alone")


def run(test: Path) -> int:
    """Exit code of a test, whose error is printed."""
    source = test.read_text(encoding="utf-8")
    try:
        exec(compile(source, test.name, "exec"), {"__name__": "__main__"})
    except Exception as error:
        own = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, own)
        return 1
    return 0


if __name__ == "__main__":
    folder = sys.argv[1]
    limit()
    guard(folder)
    sys.path.insert(0, folder)
    sys.exit(run(Path(folder, TEST_FILE)))
