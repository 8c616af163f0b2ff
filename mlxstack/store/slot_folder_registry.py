"""Registry of slot folders that share a KV store, for GC."""

import hashlib
import os
import re
from pathlib import Path

from mlxstack.core.errors import Conflict, NotFound, Unreadable
from mlxstack.store.files import Disk, children, open_private, read_whole, write_atomic
from mlxstack.store.slot_files import SlotFileFolder

FOLDER = "shelves"
NOTE = re.compile("[0-9a-f]{32}")

# Where drives appear: what is missing right below is not deleted but unplugged.
MOUNTS = ("/", "/Volumes", "/mnt", "/media", "/run/media")


def note(root: Path, directory: Path, disk: Disk | None = None) -> None:
    """Register that slot files in `directory` refer to the store `root`.

    Raises SetupError or StackError when the disk refuses.
    """
    path = os.fsencode(directory.absolute())
    disk = disk or Disk()
    open_private(root / FOLDER, disk)
    file = root / FOLDER / hashlib.sha256(path).hexdigest()[:32]
    if not file.exists():
        write_atomic(file, [path], disk)


def known(root: Path) -> tuple[SlotFileFolder, ...]:
    """All of them that are there.

    Raises Conflict when one may be on a drive that is not, or when that cannot be read now.
    """
    try:
        notes = [note for note in children(root / FOLDER) if NOTE.fullmatch(note.name)]
        named = [(note, Path(os.fsdecode(read_whole(note, Disk())))) for note in notes]
    except (NotFound, Unreadable) as error:
        raise Conflict(f"nothing was deleted: {error.message}") from error
    return tuple(
        SlotFileFolder(directory) for note, directory in named if _is_there(directory, note)
    )


def _is_there(directory: Path, note: Path) -> bool:
    if not directory.is_absolute():
        raise Conflict(f"nothing was deleted: {note} should hold the path of a slot folder")
    if directory.is_dir():
        return True
    nearest = next(parent for parent in directory.parents if parent.exists())
    if str(nearest) in MOUNTS:
        raise Conflict(
            f"nothing was deleted: the slot folder {directory} is not there, and its files may "
            f"need stored KV; plug its drive in, or delete {note} if it is gone for good"
        )
    return False
