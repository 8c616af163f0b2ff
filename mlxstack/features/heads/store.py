"""Heads of clients as private files of one folder."""

import hashlib
import logging
from pathlib import Path

import msgspec

from mlxstack.core.errors import StackError
from mlxstack.features.heads.policy import MAX_HEAD_BYTES, Head, HeadKey, surplus
from mlxstack.store.files import Disk, write_atomic

log = logging.getLogger(__name__)

SUFFIX = ".head"


class HeadStore:
    """Heads on disk, with a copy in memory. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.by_key: dict[HeadKey, Head] = {}

    def load(self) -> None:
        """Read all heads; damaged files are passed over."""
        self.by_key = {}
        for file in self._folder.glob(f"*{SUFFIX}"):
            try:
                data = file.read_bytes()
                head = msgspec.msgpack.decode(data, type=Head)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("the head %s was not read: %s", file.name, error)
                continue
            self.by_key[head.key] = msgspec.structs.replace(head, n_bytes=len(data))

    def save(self, head: Head) -> None:
        """Write a head, unless too large; delete those beyond the bounds."""
        data = msgspec.msgpack.encode(head)
        if len(data) > MAX_HEAD_BYTES:
            return
        try:
            write_atomic(self._file(head.key), [data], Disk(), is_durable=False)
        except StackError as error:
            log.warning("%s", error)
            return
        self.by_key[head.key] = msgspec.structs.replace(head, n_bytes=len(data))
        for old in surplus(tuple(self.by_key.values())):
            del self.by_key[old.key]
            self._file(old.key).unlink(missing_ok=True)

    def _file(self, key: HeadKey) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()
        return self._folder / f"{digest[:32]}{SUFFIX}"
