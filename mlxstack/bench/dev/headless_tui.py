"""A headless dashboard: `mlx-stack tui` on a pseudo-terminal, recording."""

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from mlxstack.bench.servers import Sandbox
from mlxstack.core.errors import Broken

COMMAND = (sys.executable, "-m", "mlxstack.cli.main", "tui")
ATTACHED_WITHIN_S = 60.0
PATIENCE_S = 20.0
POLL_S = 0.05
N_FIRST = 5
"""Frames before measurement, for start and first drawing."""


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far, its own and the kernel's."""
    taken = process.cpu_times()
    return float(taken.user + taken.system)


class Spectator:
    """The process of one dashboard and its recording."""

    def __init__(self, pid: int, recording: Path) -> None:
        self._process = psutil.Process(pid)
        self._recording = recording

    def cpu_s(self) -> float:
        """CPU seconds so far, its own and the kernel's."""
        return cpu_s(self._process)

    def n_frames(self) -> int:
        """Frames that it was sent so far."""
        if self._recording.exists():
            return self._recording.read_bytes().count(b"\n")
        return 0


@contextlib.asynccontextmanager
async def spectator(stage: Sandbox, url: str, size: tuple[int, int]) -> AsyncIterator[Spectator]:
    """Attached dashboard of `size` columns and lines, ended by key.

    Raises Broken when it does not attach.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    recording = stage.folder / f"watched-{time.monotonic_ns()}.jsonl"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--url", url, "--record", str(recording), env=_env(stage), stdin=theirs,
        stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    asyncio.get_running_loop().add_reader(ours, _drain, ours)
    try:
        watcher = Spectator(process.pid, recording)
        await _attached(process, watcher)
        yield watcher
        os.write(ours, b"q")
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _attached(process: asyncio.subprocess.Process, watcher: Spectator) -> None:
    deadline = time.monotonic() + ATTACHED_WITHIN_S
    while watcher.n_frames() < N_FIRST:
        if process.returncode is not None or time.monotonic() > deadline:
            raise Broken("`mlx-stack tui` did not attach to the service that is measured")
        await asyncio.sleep(POLL_S)


def _env(stage: Sandbox) -> dict[str, str]:
    """The size is the terminal's, not that of the variables."""
    env = {name: value for name, value in stage.env.items() if name not in {"COLUMNS", "LINES"}}
    return {**env, "TERM": "xterm-256color", "MLX_STACK_HOME": str(stage.folder / "home")}


def _drain(terminal: int) -> None:
    """Discard its output, until the terminal is closed."""
    with contextlib.suppress(OSError):
        os.read(terminal, 65536)
