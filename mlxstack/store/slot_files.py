"""The slot files of one folder: saved contexts with a name."""

import os
import re
import unicodedata
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from mlxstack.core.errors import BadRequest, Conflict, NotFound
from mlxstack.core.interfaces import Manifest
from mlxstack.store.files import (
    TEMPORARY,
    Disk,
    begins_with,
    children,
    clear_leftovers,
    naming,
    open_private,
    read_whole,
    touch,
    write_atomic,
)
from mlxstack.store.manifest_file import MAGIC, pack, unpack


class SlotFile(Struct, frozen=True):
    """Slot file; `n_bytes` of its own, `used_at` in Unix seconds."""

    name: str
    path: str
    n_bytes: int
    used_at: float


class SlotFileFolder:
    """A `core.interfaces.SlotFileStore`. Raises SetupError when `directory` cannot be created.

    The folder may be the user's own: files that are not slot files are never listed, removed
    or replaced.
    """

    def __init__(self, directory: Path, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        open_private(directory, self._disk)
        self.directory = directory.resolve()
        clear_leftovers(self.directory.glob(TEMPORARY + "*"))

    @staticmethod
    def check(name: str) -> None:
        """Raises BadRequest when `name` is not a safe file name."""
        if reason := _objection(name):
            raise BadRequest(f"Invalid filename: {reason}", "filename")

    def check_replaceable(self, name: str) -> None:
        """Raise BadRequest for a bad name, Conflict for a foreign file."""
        path = self._path(name)
        if os.path.lexists(path) and not begins_with(path, MAGIC, self._disk):
            raise Conflict(
                f"{name} is not a slot file, so it is not replaced; save under another name, or "
                f"move the file out of {self.directory}"
            )

    def write(self, name: str, manifest: Manifest) -> int:
        """Replace a slot file atomically and durably; bytes written.

        Raises BadRequest, Conflict when another kind of file has this name, or a file whose name
        differs only for a volume that ignores case, or StackError when the disk refuses.
        """
        self.check_replaceable(name)
        return write_atomic(self._path_to_write(name), pack(manifest), self._disk)

    def read(self, name: str) -> Manifest:
        """The manifest, marked as used now. Raises BadRequest, NotFound or Damaged."""
        path = self._path(name)
        if path not in children(self.directory):
            raise NotFound(f"there is no file {name}")
        manifest = self._read(name, path)
        touch(path)
        return manifest

    def peek(self, slot_file: SlotFile) -> Manifest:
        """Read a file of `list`, not marked as used. Raises as `read`."""
        return self._read(slot_file.name, Path(slot_file.path))

    def _read(self, name: str, path: Path) -> Manifest:
        data = read_whole(path, self._disk)
        with naming(f"slot file {name}", "; restore it with that release"):
            return unpack(data)

    def list(self) -> tuple[SlotFile, ...]:
        """All slot files by name, damaged ones included. Raises Unreadable."""
        slot_files = (self._look(path) for path in children(self.directory))
        return tuple(slot_file for slot_file in slot_files if slot_file is not None)

    def _path(self, name: str) -> Path:
        """File of this name in any normalization; new names in NFC.

        Names are compared here, because a volume that ignores case opens `a.bin` for `A.bin`.
        """
        self.check(name)
        same = [p for p in children(self.directory) if normalized(p.name) == normalized(name)]
        path = self.directory / normalized(name)
        return path if path in same or not same else same[0]

    def _path_to_write(self, name: str) -> Path:
        path = self._path(name)
        existing = children(self.directory)
        namesake = next((p for p in existing if folded(p.name) == folded(name)), path)
        if namesake.name != path.name and path not in existing:
            raise Conflict(
                f"there is {namesake.name} already, and names that differ only by case are one "
                f"file on some disks; save to {namesake.name} or choose another name"
            )
        return path

    def _look(self, path: Path) -> SlotFile | None:
        with suppress(BadRequest, FileNotFoundError):
            self.check(path.name)
            if begins_with(path, MAGIC, self._disk):
                about = path.lstat()
                return SlotFile(path.name, str(path), about.st_size, about.st_mtime)
        return None


FORBIDDEN = re.compile(
    '[/\\\\:*?"<>|\x00-\x1f\x7f-\x9f\uff0e\u2215\u2216\ufffd\ufeff\ud800-\udfff]'
)
MAX_BYTES = 255


def normalized(name: str) -> str:
    """Name in one Unicode normalization: macOS sends NFD."""
    return unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Key that is equal for one file without case (APFS)."""
    return normalized(normalized(name).casefold())


def _objection(name: str) -> str:
    if match := FORBIDDEN.search(name):
        return f"it contains {match.group()!a}"
    n_bytes = len(name.encode())
    if not 1 <= n_bytes <= MAX_BYTES:
        return f"it has {n_bytes} bytes, 1 to {MAX_BYTES} are allowed"
    if ".." in name or name.endswith("."):
        return 'it contains ".." or ends with "."'
    if name != name.strip(" "):
        return "it begins or ends with a space"
    return ""
