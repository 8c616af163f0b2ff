"""Power loss, replayed: records what is done to the files of a folder, and cuts it anywhere.

What a medium holds after a cut is no more than POSIX promises: bytes of a file since its last
sync may be missing or torn, and so may names in a folder since the folder's last sync, each by
itself. Only what was synced is certain.

A disk with barriers, as on a Mac, promises one thing more: what a barrier flushed is on the
medium before any later change, and after the next sync of anything. How many barriers a cut
leaves behind since then is open.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field

from mlxstack.store.files import Disk

T = TypeVar("T")


class Op(Struct, frozen=True):
    """One change below the watched folder; paths are relative to it, "" is the folder itself."""

    kind: str
    path: str
    to: str = ""
    data: bytes = b""


class Recorder:
    """Hears of every name that changes, from Python itself, and of every byte, from a `Disk`."""

    def __init__(self, *, has_barriers: bool = False) -> None:
        self.root = Path()
        self.ops: list[Op] = []
        self.disk = _BarrierDisk(self) if has_barriers else _TellingDisk(self)
        self._is_on = False
        # A hook can never be taken away again.
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self, root: Path) -> Iterator[list[Op]]:
        """The operations below `root`, as they come; it must be empty before."""
        assert not any(root.iterdir())
        self.root = root.resolve()
        self.ops = []
        self._is_on = True
        try:
            yield self.ops
        finally:
            self._is_on = False

    def record(self, kind: str, fd: int, data: bytes = b"") -> None:
        """Something was done through a descriptor."""
        path = self._inside(_path_of(fd), None)
        if self._is_on and path is not None:
            self.ops.append(Op(kind, path, "", data))

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        read = READERS.get(event)
        if self._is_on and read is not None:
            op = read(details, self._inside)
            if op is not None:
                self.ops.append(op)

    def _inside(self, path: object, fd: int | None) -> str | None:
        """`path` below the root; None for others. `fd` is the folder it counts from."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        start = _path_of(fd) if fd is not None and fd >= 0 else str(Path.cwd())
        full = Path(os.path.normpath(os.path.join(start, os.fsdecode(path))))  # noqa: PTH118
        if not full.is_relative_to(self.root):
            return None
        return str(full.relative_to(self.root)).removeprefix(".") or ""


class _TellingDisk(Disk):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def write(self, fd: int, data: memoryview) -> int:
        n_done = super().write(fd, data)
        self._recorder.record("write", fd, bytes(data[:n_done]))
        return n_done

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._recorder.record("sync", fd)


class _BarrierDisk(_TellingDisk):
    def barrier(self, fd: int) -> None:
        self._recorder.record("barrier", fd)

    def complete_barriers(self, fd: int) -> None:
        self.sync(fd)


Inside = Callable[[object, int | None], str | None]


def _opened(details: tuple[Any, ...], inside: Inside) -> Op | None:
    name, _, flags = details
    path = inside(name, None)
    return Op("create", path) if path is not None and flags & os.O_CREAT else None


def _renamed(details: tuple[Any, ...], inside: Inside) -> Op | None:
    source = inside(details[0], details[2])
    target = inside(details[1], details[3])
    if source is None or target is None:
        assert source is target, "nothing moves in or out"
        return None
    return Op("rename", source, target)


def _named(kind: str, at: int) -> Callable[[tuple[Any, ...], Inside], Op | None]:
    def read(details: tuple[Any, ...], inside: Inside) -> Op | None:
        path = inside(details[0], details[at])
        return None if path is None else Op(kind, path)

    return read


READERS = {
    "open": _opened,
    "os.rename": _renamed,
    "os.mkdir": _named("mkdir", 2),
    "os.remove": _named("unlink", 1),
    "os.rmdir": _named("unlink", 1),
}


def _path_of(fd: int) -> str:
    if sys.platform == "darwin":
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return str(Path(f"/proc/self/fd/{fd}").readlink())


Names = dict[str, "File | Folder | None"]


class Pending(Struct):
    """A change after `since` barriers; barrier number `flushed_by` flushed it."""

    change: Any
    since: int
    flushed_by: int | None = None


class File(Struct):
    """Writes to a file, in order."""

    pending: list[Pending] = field(default_factory=list)


class Folder(Struct):
    """Names as the system sees them, and the changes that led to them, in order."""

    seen: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)


Tree = dict[str, bytes | None]
"""A path to its bytes; None for a folder."""


class Survival(Struct, frozen=True):
    """Which of the changes that were not synced are on the medium all the same, in order.

    `barriers` is the share of the barriers since the last sync that were completed.
    """

    name: str
    names: Callable[[Sequence[Any]], Sequence[Any]]
    data: Callable[[Sequence[bytes]], Sequence[bytes]]
    barriers: float = 1.0


class Medium:
    """What a disk holds while operations come in."""

    def __init__(self) -> None:
        self._root = Folder()
        self._n_barriers = 0
        self._n_complete = 0

    def take(self, op: Op) -> None:
        """Do as the system does. What it would refuse changes nothing."""
        if op.kind in {"sync", "barrier"}:
            self._n_barriers += 1
            found = self._find(op.path)
            for pending in found.pending:
                pending.flushed_by = pending.flushed_by or self._n_barriers
            if op.kind == "sync":
                self._n_complete = self._n_barriers
                whole = (
                    b"".join(pending.change for pending in found.pending)
                    if isinstance(found, File)
                    else dict(found.seen)
                )
                found.pending = [Pending(whole, 0, self._n_barriers)]
            return
        if op.kind == "write":
            found = self._find(op.path)
            assert isinstance(found, File), op
            found.pending.append(Pending(op.data, self._n_barriers))
            return
        parent, name = self._parent(op.path)
        if op.kind == "rename":
            target, new = self._parent(op.to)
            assert target is parent, "a move between folders is not known here"
            if name in parent.seen:
                self._change(parent, {name: None, new: parent.seen[name]})
        elif op.kind == "unlink":
            if name in parent.seen:
                self._change(parent, {name: None})
        elif name not in parent.seen:
            self._change(parent, {name: Folder() if op.kind == "mkdir" else File()})

    def after(self, survival: Survival) -> Tree:
        """The files after a cut now."""
        tree: Tree = {}
        n_open = self._n_barriers - self._n_complete
        n_done = self._n_complete + int(n_open * survival.barriers)
        _grow(tree, "", self._root, survival, n_done)
        return tree

    def _change(self, folder: Folder, names: Names) -> None:
        folder.pending.append(Pending(names, self._n_barriers))
        _apply(folder.seen, names)

    def _find(self, path: str) -> "File | Folder":
        found: File | Folder = self._root
        for name in path.split("/") if path else ():
            assert isinstance(found, Folder)
            found = found.seen[name]
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        found = self._find(above)
        assert isinstance(found, Folder)
        return found, name


def _left(pending: Sequence[Pending], n_done: int, choose: Callable[[Any], Any]) -> list[Any]:
    """The changes that a cut leaves after `n_done` complete barriers."""
    sure = [p.change for p in pending if p.flushed_by is not None and p.flushed_by <= n_done]
    open_ = [
        p.change
        for p in pending
        if (p.flushed_by is None or p.flushed_by > n_done) and p.since <= n_done
    ]
    return [*sure, *choose(open_)]


def _apply(entries: dict[str, "File | Folder"], names: dict[str, "File | Folder | None"]) -> None:
    for name, found in names.items():
        if found is None:
            entries.pop(name, None)
        else:
            entries[name] = found


def _grow(tree: Tree, path: str, found: File | Folder, survival: Survival, n_done: int) -> None:
    if isinstance(found, File):
        tree[path] = b"".join(_left(found.pending, n_done, survival.data))
        return
    tree[path] = None
    entries: dict[str, File | Folder] = {}
    for names in _left(found.pending, n_done, survival.names):
        _apply(entries, names)
    for name, below in entries.items():
        _grow(tree, f"{path}/{name}".lstrip("/"), below, survival, n_done)


def plant(tree: Tree, root: Path) -> None:
    """Make `root`, which must not exist, hold exactly this tree."""
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)


def look(root: Path) -> Tree:
    """The tree below `root`."""
    tree: Tree = {"": None}
    for path in root.rglob("*"):
        tree[str(path.relative_to(root))] = None if path.is_dir() else path.read_bytes()
    return tree


def everything(changes: Sequence[T]) -> Sequence[T]:
    """All of it is on the medium."""
    return changes


def nothing(_changes: Sequence[T]) -> Sequence[T]:
    """None of it is."""
    return ()


def torn(writes: Sequence[bytes]) -> Sequence[bytes]:
    """Of the last write, one half."""
    return [*writes[:-1], writes[-1][: len(writes[-1]) // 2]] if writes else []


def some(random: Any) -> Callable[[Sequence[T]], Sequence[T]]:
    """Each by chance."""
    return lambda changes: [change for change in changes if random.random() < 0.5]
