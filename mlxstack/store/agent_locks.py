"""Agent locks between the processes of a home, released at exit.

<root>/<agent>.turn       held while a turn or an edit goes on; shared by requests that bring
                          their own conversation
<root>/<agent>.history    held while a history is read and replaced
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from mlxstack.core.errors import BadRequest
from mlxstack.store.agent_history import folder_of, is_agent
from mlxstack.store.atomic_write import open_private
from mlxstack.store.disk_io import Disk, refused

TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class AgentLock:
    """Held lock and context manager; without a descriptor a no-op."""

    def __init__(self, fd: int | None = None, doomed: Path | None = None) -> None:
        self._fd = fd
        self._doomed = doomed

    def release(self) -> None:
        """Release the lock; its file is deleted when nothing holds it."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if self._doomed is not None:
            with suppress(OSError):  # an empty file that stays does no harm
                self._doomed.unlink()
        os.close(fd)

    def __enter__(self) -> "AgentLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class AgentLockFiles:
    """Non-blocking agent locks for any thread. Raises SetupError for `root`.

    Every method raises BadRequest on an impossible agent id, and StackError when the disk
    refuses.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self._root = root
        open_private(root, disk or Disk())

    def turn(self, agent: str) -> AgentLock | None:
        """Lock of a turn or an edit; None while otherwise held."""
        return self._acquire(agent, "turn", fcntl.LOCK_EX)

    def request(self, agent: str) -> AgentLock | None:
        """Lock shared among requests; None while a turn holds it."""
        return self._acquire(agent, "turn", fcntl.LOCK_SH)

    def history(self, agent: str) -> AgentLock | None:
        """Lock of a history's writer; None while otherwise held."""
        return self._acquire(agent, "history", fcntl.LOCK_EX)

    def _acquire(self, agent: str, kind: str, how: int) -> AgentLock | None:
        if not is_agent(agent):
            raise BadRequest(f"{agent!r} is no agent id", "agent")
        path = self._root / f"{folder_of(agent)}.{kind}"
        try:
            while (fd := _locked(path, how)) is not None:
                if os.fstat(fd).st_nlink:
                    return AgentLock(fd, path if how == fcntl.LOCK_EX else None)
                os.close(fd)  # its last holder removed it in the instant before the lock
        except OSError as error:
            raise refused(f"agent {agent} was not locked", error) from error
        return None


def _locked(path: Path, how: int) -> int | None:
    """Descriptor of the locked file, None if taken. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in TAKEN:
            return None
        raise
    return fd
