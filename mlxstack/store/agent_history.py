"""Agent folders: history and saved contexts; locks between processes.

<root>/<agent>/history.json             readable, for any model
<root>/<agent>/<model>/manifest.json    the saved context of one model
<locks>/<agent>.turn                    held while a turn or an edit goes on; shared by requests
                                        that bring their own conversation
<locks>/<agent>.history                 held while a history is read and replaced

Folder names of agents are readable, reversible, and distinct where "A" and "a" are one file:
":" becomes "=", a leading "." becomes "+", and capitals become small letters, followed by "~"
and their positions as bits in hexadecimal: "Bob:1" is "bob=1~1".
"""

import errno
import fcntl
import os
import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import BadRequest, Damaged, NotFound, StackError, Unreadable
from mlxstack.core.ports import Manifest
from mlxstack.store.files import (
    TEMPORARY,
    Disk,
    because,
    children,
    clear_leftovers,
    naming,
    open_private,
    parse_json,
    read_whole,
    refused,
    remove_folder,
    touch,
    write_atomic,
)
from mlxstack.store.manifest_file import from_json, to_json

AGENT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
FOLDER = re.compile(r"(?P<stem>[a-z0-9+_=-][a-z0-9._=-]{0,127})(?:~(?P<bits>[0-9a-f]{1,32}))?")


def is_agent(agent: str) -> bool:
    """Whether `agent` is a possible id."""
    return AGENT.fullmatch(agent) is not None


def folder_of(agent: str) -> str:
    """The folder name of a possible id."""
    stem = agent.lower().replace(":", "=")
    stem = "+" + stem[1:] if stem.startswith(".") else stem
    bits = sum(1 << at for at, letter in enumerate(agent) if letter.isupper())
    return f"{stem}~{bits:x}" if bits else stem


def name_of(folder: str) -> str | None:
    """The id whose folder this is, or None for a foreign folder."""
    match = FOLDER.fullmatch(folder)
    if match is None:
        return None
    stem, bits = match["stem"].replace("=", ":").replace("+", "."), int(match["bits"] or "0", 16)
    agent = "".join(letter.upper() if bits >> at & 1 else letter for at, letter in enumerate(stem))
    return agent if folder_of(agent) == folder else None


VERSION = 1
MODEL = re.compile(r"[0-9a-z][0-9a-z._-]{0,127}")


class History(Struct, frozen=True):
    """History of an agent. `facts` belongs to the service."""

    messages: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class HistoryFile(Struct, frozen=True):
    """Content of history.json."""

    version: int
    agent: str
    facts: dict[str, Any]
    messages: tuple[dict[str, Any], ...]


class ManifestFile(Struct, frozen=True):
    """One manifest.json; `n_bytes` of its own, `used_at` in Unix seconds."""

    agent: str
    model: str
    path: str
    n_bytes: int
    used_at: float


class AgentFolders:
    """Callable from any thread. Raises SetupError when `root` cannot be created.

    Every method raises BadRequest on an impossible agent id; `model` is an `Identity.key()`.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or Disk()
        open_private(root, self._disk)
        clear_leftovers(root.rglob(TEMPORARY + "*"))

    def agents(self) -> tuple[str, ...]:
        """The ids of all agents that have a history, sorted. Raises Unreadable."""
        folders = (one for one in children(self.root) if (one / "history.json").exists())
        names = (name_of(folder.name) for folder in folders)
        return tuple(sorted(agent for agent in names if agent is not None))

    def has(self, agent: str) -> bool:
        """Whether this agent has a history, sound or not. Raises Unreadable."""
        try:
            self._history(agent).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise Unreadable(
                f"the folder of agent {agent} cannot be read: {because(error)}"
            ) from error
        return True

    def write(self, agent: str, history: History) -> int:
        """Replace the history atomically and durably; bytes. Raises StackError."""
        about = HistoryFile(VERSION, agent, history.facts, history.messages)
        text = msgspec.json.format(msgspec.json.encode(about), indent=2)
        return write_atomic(self._history(agent), [text, b"\n"], self._disk)

    def read(self, agent: str) -> History:
        """Raises NotFound or Damaged."""
        data = self._read(self._history(agent), f"history of agent {agent}")
        with naming(f"history of agent {agent}"):
            about = parse_json(data, HistoryFile)
            if (about.version, about.agent) != (VERSION, agent):
                raise Damaged(f"it is version {about.version} of agent {about.agent}")
        return History(about.messages, about.facts)

    def write_manifest(self, agent: str, model: str, manifest: Manifest) -> int:
        """Replace the manifest atomically and durably; bytes. Raises StackError."""
        return write_atomic(self._manifest(agent, model), [to_json(manifest)], self._disk)

    def read_manifest(self, agent: str, model: str) -> Manifest:
        """The manifest, marked as used now. Raises NotFound or Damaged."""
        manifest = self.peek_manifest(agent, model)
        touch(self._manifest(agent, model))
        return manifest

    def peek_manifest(self, agent: str, model: str) -> Manifest:
        """Read a manifest without marking it as used."""
        data = self._read(self._manifest(agent, model), f"saved context of agent {agent}")
        with naming(f"saved context of agent {agent}"):
            return from_json(data)

    def manifests(self) -> tuple[ManifestFile, ...]:
        """Every manifest of every agent, damaged ones included, sorted. Raises Unreadable."""
        named = ((name_of(folder.name), folder) for folder in children(self.root))
        return tuple(
            file
            for agent, folder in named
            if agent is not None
            for model in children(folder)
            if MODEL.fullmatch(model.name)
            if (file := _look(agent, model)) is not None
        )

    def remove(self, agent: str) -> None:
        """Delete an agent's history and manifests. Raises NotFound or StackError."""
        try:
            remove_folder(self._folder(agent), self._disk)
        except FileNotFoundError:
            raise NotFound(f"there is no agent {agent}") from None
        except OSError as error:
            raise refused(f"agent {agent} was not removed", error) from error

    def _read(self, path: Path, what: str) -> bytes:
        try:
            return read_whole(path, self._disk)
        except NotFound:
            raise NotFound(f"there is no {what}") from None

    def _folder(self, agent: str) -> Path:
        if not is_agent(agent):
            raise BadRequest(
                "an agent id has 1 to 128 of the characters A-Z a-z 0-9 . _ : -", "agent"
            )
        return self.root / folder_of(agent)

    def _history(self, agent: str) -> Path:
        return self._folder(agent) / "history.json"

    def _manifest(self, agent: str, model: str) -> Path:
        if not MODEL.fullmatch(model):
            raise StackError(f"{model!r} is not the key of an identity")
        return self._folder(agent) / model / "manifest.json"


def _look(agent: str, folder: Path) -> ManifestFile | None:
    path = folder / "manifest.json"
    with suppress(FileNotFoundError, NotADirectoryError):
        about = path.lstat()
        return ManifestFile(agent, folder.name, str(path), about.st_size, about.st_mtime)
    return None


TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class AgentLock(AbstractContextManager["AgentLock"]):
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

    def __exit__(self, *_: object) -> None:
        self.release()


class AgentLockFiles:
    """Non-blocking agent locks for any thread. Raises SetupError for `root`.

    Every method raises BadRequest on an impossible agent id, and StackError when the disk
    refuses.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        open_private(root, Disk())

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
