"""Idle sleep of this computer, prevented while requests run.

A Mac that is set to sleep when its user is away does so under a running agent, and its streams
break. `caffeinate -i` holds a power assertion against that; `-w` ends it with this process, also
when this process is killed. A closed lid sleeps all the same. Elsewhere nothing is done: Linux
servers do not sleep by themselves.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger("mlxstack.sleep")

CAFFEINATE = "/usr/bin/caffeinate"
LINGER_S = 60.0
"""Seconds of assertion after a request, while agents run tools."""

END_S = 1.0


class SleepAssertion:
    """Power assertion during requests, and `LINGER_S` seconds longer.

    `command` is the program that holds it while it runs; None does nothing. Used from one event
    loop. `why_not` says why the last attempt to hold it failed, and is empty otherwise.
    """

    def __init__(self, command: tuple[str, ...] | None) -> None:
        self.why_not = ""
        self.command = command
        self._n_requests = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._release: asyncio.TimerHandle | None = None

    @property
    def is_held(self) -> bool:
        """Whether the computer is kept awake now."""
        return self._process is not None and self._process.poll() is None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the computer awake while a request runs."""
        self._n_requests += 1
        self._acquire()
        try:
            yield
        finally:
            self._n_requests -= 1
            if not self._n_requests and self.is_held:
                loop = asyncio.get_running_loop()
                self._release = loop.call_later(LINGER_S, self.close)

    def close(self) -> None:
        """Let the computer sleep from now on."""
        self._cancel_release()
        process = self._process
        self._process = None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _acquire(self) -> None:
        self._cancel_release()
        if self.command is None or self.is_held:
            return
        with suppress(OSError):
            # Without close_fds CPython spawns instead of forking a process with a whole model;
            # descriptors of Python are not inherited anyway.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=False,
            )
            self.why_not = ""
            return
        if not self.why_not:
            self.why_not = f"{self.command[0]} cannot be started"
            log.warning("this computer may sleep while requests run: %s", self.why_not)

    def _cancel_release(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None


def caffeinate(platform: str = sys.platform) -> tuple[str, ...] | None:
    """Command that keeps a Mac awake with this process, else None."""
    if platform == "darwin":
        return (CAFFEINATE, "-i", "-w", str(os.getpid()))
    return None
