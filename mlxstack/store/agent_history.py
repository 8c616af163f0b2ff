"""Agent folders: history and saved contexts; locks between processes.

<root>/<agent>/history.json             readable, for any model
<root>/<agent>/images/<SHA-256>         an image of the history, once
<root>/<agent>/settings.json            the settings of an agent without a history
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
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import BadRequest, Damaged, NotFound, StackError, Unreadable
from mlxstack.core.interfaces import Manifest
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
    sync_directory,
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
    bits = sum(1 << index for index, letter in enumerate(agent) if letter.isupper())
    return f"{stem}~{bits:x}" if bits else stem


def name_of(folder: str) -> str | None:
    """The id whose folder this is, or None for a foreign folder."""
    match = FOLDER.fullmatch(folder)
    if match is None:
        return None
    stem = match["stem"].replace("=", ":").replace("+", ".")
    bits = int(match["bits"] or "0", 16)
    letters = list(stem)
    for index, letter in enumerate(stem):
        if bits >> index & 1:
            letters[index] = letter.upper()
    agent = "".join(letters)
    return agent if folder_of(agent) == folder else None


VERSION = 2
"""Version of a history.json with images beside it."""
VERSION_WITHOUT_IMAGES = 1
"""Version of one without; older ones have images in the messages."""
IMAGES = "images"
SETTINGS = "settings.json"
"""File with the settings of an agent without a history."""
OF_IMAGE = "sha256:"
"""Scheme of the address of an image that lies beside the history."""
IMAGE = re.compile(rf"{OF_IMAGE}([0-9a-f]{{64}})")
MODEL = re.compile(r"[0-9a-z][0-9a-z._-]{0,127}")


class History(Struct, frozen=True):
    """History of an agent. `facts` belongs to the service.

    `images` are encoded images by SHA-256 that the messages name, as far as they are not stored.
    """

    messages: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    images: dict[str, bytes] = msgspec.field(default_factory=dict)


class HistoryFile(Struct, frozen=True):
    """Content of history.json."""

    version: int
    agent: str
    facts: dict[str, Any]
    messages: tuple[dict[str, Any], ...]


def image_name(data: bytes) -> str:
    """Name of an image's file: the SHA-256 of its encoded bytes."""
    return hashlib.sha256(data).hexdigest()


def image_names(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the images that messages have beside their history."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return frozenset(name for part in parts if (name := image_of(part)) is not None)


def image_of(part: Any) -> str | None:
    """Name of the stored image of a part of a content."""
    match part:
        case {"image_url": {"url": str(url)}} if (match := IMAGE.fullmatch(url)) is not None:
            return match[1]
    return None


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
        folders = (folder for folder in children(self.root) if (folder / "history.json").exists())
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
        """Replace the history atomically and durably; bytes. Raises StackError.

        New images are on the medium before it, and those that it names no more go after it: a
        crash leaves images too many, which the next write removes.
        """
        names = image_names(history.messages)
        n_bytes = 0
        for name in sorted(names):
            n_bytes += self._write_image(agent, name, history.images.get(name))
        if names:
            # Their names may be those of a process that died before it flushed them.
            sync_directory(self._folder(agent) / IMAGES, self._disk.barrier)
        version = VERSION if names else VERSION_WITHOUT_IMAGES
        about = HistoryFile(version, agent, history.facts, history.messages)
        text = msgspec.json.format(msgspec.json.encode(about), indent=2)
        n_bytes += write_atomic(self._history(agent), [text, b"\n"], self._disk)
        self._remove_images(agent, names)
        return n_bytes

    def image(self, agent: str, name: str) -> bytes:
        """An image of a history. Raises Damaged."""
        title = f"image {name[:12]} of agent {agent}"
        try:
            data = self._read(self._image(agent, name), title)
        except NotFound as error:
            raise Damaged(error.message) from None
        if image_name(data) != name:
            raise Damaged(f"the {title} is damaged")
        return data

    def read(self, agent: str) -> History:
        """Raises NotFound or Damaged."""
        data = self._read(self._history(agent), f"history of agent {agent}")
        with naming(f"history of agent {agent}"):
            about = parse_json(data, HistoryFile)
            is_readable = about.version in (VERSION, VERSION_WITHOUT_IMAGES)
            if not is_readable or about.agent != agent:
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

    def agents_with_settings(self) -> tuple[str, ...]:
        """The ids of agents with settings beside a history. Raises Unreadable."""
        folders = (folder for folder in children(self.root) if (folder / SETTINGS).exists())
        names = (name_of(folder.name) for folder in folders)
        return tuple(sorted(agent for agent in names if agent is not None))

    def read_settings(self, agent: str) -> dict[str, Any]:
        """Raises NotFound or Damaged."""
        title = f"file with settings of agent {agent}"
        data = self._read(self._folder(agent) / SETTINGS, title)
        with naming(title):
            return parse_json(data, dict[str, Any])

    def write_settings(self, agent: str, fields: Mapping[str, Any]) -> None:
        """Replace the settings beside a history, or remove the file. Raises StackError."""
        path = self._folder(agent) / SETTINGS
        if fields:
            write_atomic(path, [msgspec.json.encode(fields), b"\n"], self._disk)
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise refused(f"the settings of agent {agent} were not removed", error) from error

    def _write_image(self, agent: str, name: str, data: bytes | None) -> int:
        """Bytes written of an image; 0 for a stored one. Raises StackError."""
        path = self._image(agent, name)
        try:
            n_there = path.lstat().st_size
        except OSError:
            n_there = -1
        if data is None and n_there < 0:
            raise StackError(f"the history of agent {agent} was not saved: an image is missing")
        if data is None or n_there == len(data):
            return 0
        return write_atomic(path, [data], self._disk)

    def _remove_images(self, agent: str, names: frozenset[str]) -> None:
        """Remove the images that a history no longer names."""
        with suppress(StackError):
            for path in children(self._folder(agent) / IMAGES):
                if path.name not in names and not path.name.startswith(TEMPORARY):
                    with suppress(OSError):  # the next write tries again
                        path.unlink()

    def _read(self, path: Path, title: str) -> bytes:
        try:
            return read_whole(path, self._disk)
        except NotFound:
            raise NotFound(f"there is no {title}") from None

    def _folder(self, agent: str) -> Path:
        if not is_agent(agent):
            raise BadRequest(
                "an agent id has 1 to 128 of the characters A-Z a-z 0-9 . _ : -", "agent"
            )
        return self.root / folder_of(agent)

    def _history(self, agent: str) -> Path:
        return self._folder(agent) / "history.json"

    def _image(self, agent: str, name: str) -> Path:
        return self._folder(agent) / IMAGES / name

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
        fd = self._fd
        self._fd = None
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

    def _acquire(self, agent: str, kind: str, lock_mode: int) -> AgentLock | None:
        if not is_agent(agent):
            raise BadRequest(f"{agent!r} is no agent id", "agent")
        path = self._root / f"{folder_of(agent)}.{kind}"
        try:
            while (fd := _locked(path, lock_mode)) is not None:
                if os.fstat(fd).st_nlink:
                    return AgentLock(fd, path if lock_mode == fcntl.LOCK_EX else None)
                os.close(fd)  # its last holder removed it in the instant before the lock
        except OSError as error:
            raise refused(f"agent {agent} was not locked", error) from error
        return None


def _locked(path: Path, lock_mode: int) -> int | None:
    """Descriptor of the locked file, None if taken. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, lock_mode | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in TAKEN:
            return None
        raise
    return fd
