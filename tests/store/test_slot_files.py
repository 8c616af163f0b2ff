"""Slot files on a real disk: safe names, whole files, nobody else's business."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.errors import (
    BadRequest,
    Conflict,
    Damaged,
    NotFound,
    SetupError,
    StackError,
    UnknownVersion,
)
from mlxstack.core.interfaces import Manifest, SlotFileStore
from mlxstack.store.manifest_file import pack, unpack
from mlxstack.store.slot_files import SlotFileFolder
from tests.store.bad_disks import FullDisk, UnsyncableDisk
from tests.store.kv_files import MANIFESTS, manifest

BAD_NAMES = [
    "", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b", "a:b", "a*", "a?", 'a"', "a<", "a>",
    "a|b", "a\0b", "a\n", "\x1f", "\x7f", "\x80", "\x9f", "\uff0e\uff0e", "a\u2215b", "a\u2216b",
    "\ufffd", "\ufeffa", "\udc80", " a", "a ", "a.", "a..b", "..tmp-x", "x" * 256, "é" * 128,
]  # fmt: skip
GOOD_NAMES = ["s1.bin", "a b", ".hidden", "日本語.bin", "x" * 255, "é" * 127, "-rf", "a.b.c"]


@pytest.fixture
def shelf(tmp_path: Path) -> SlotFileFolder:
    return SlotFileFolder(tmp_path / "slots")


def as_shelf(shelf: SlotFileStore) -> SlotFileStore:
    return shelf


@pytest.mark.parametrize("name", BAD_NAMES)
def test_c9_a_bad_name_is_refused_and_nothing_is_written(
    shelf: SlotFileFolder, tmp_path: Path, name: str
) -> None:
    for action in (
        lambda: shelf.check(name),
        lambda: shelf.write(name, manifest()),
        lambda: shelf.read(name),
    ):
        with pytest.raises(BadRequest, match=r"^Invalid filename") as caught:
            action()
        assert caught.value.param == "filename"
    assert [path.name for path in tmp_path.rglob("*")] == ["slots"]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_c9_a_good_name_is_kept(shelf: SlotFileFolder, name: str) -> None:
    shelf.write(name, manifest("k1"))
    assert shelf.read(name) == manifest("k1")
    assert [file.name for file in shelf.list()] == [name]


@given(st.text(st.characters(), max_size=40))
def test_c9_no_name_leaves_the_folder(name: str) -> None:
    folder = Path("/some/folder")
    try:
        SlotFileFolder.check(name)
    except BadRequest:
        return
    assert Path(os.path.normpath(folder / name)).parent == folder


@given(MANIFESTS)
def test_c6_any_manifest_survives(saved: Manifest) -> None:
    assert unpack(b"".join(pack(saved))) == saved


def test_c11_overwriting_replaces_and_is_private(shelf: SlotFileFolder) -> None:
    as_shelf(shelf).write("a.bin", manifest("k1"))
    n_bytes = shelf.write("a.bin", manifest("k2", tokens=tuple(range(1000))))
    assert shelf.read("a.bin") == manifest("k2", tokens=tuple(range(1000)))
    (file,) = shelf.list()
    assert file.n_bytes == n_bytes == Path(file.path).stat().st_size
    assert stat.S_IMODE(Path(file.path).stat().st_mode) == 0o600
    assert stat.S_IMODE(shelf.directory.stat().st_mode) == 0o700
    assert [path.name for path in shelf.directory.iterdir()] == ["a.bin"]


def test_tokens_are_compact(shelf: SlotFileFolder) -> None:
    assert shelf.write("a.bin", manifest(tokens=tuple(range(0, 60_000, 2)))) < 100_000


def test_c7_a_missing_file_is_named(shelf: SlotFileFolder) -> None:
    with pytest.raises(NotFound, match=r"agent\.bin"):
        shelf.read("agent.bin")


def test_reading_is_using_and_peeking_is_not(shelf: SlotFileFolder) -> None:
    shelf.write("a.bin", manifest())
    path = shelf.directory / "a.bin"
    os.utime(path, (1000, 1000))
    shelf.peek(shelf.list()[0])
    assert shelf.list()[0].used_at == 1000
    shelf.read("a.bin")
    assert shelf.list()[0].used_at > 1000


def test_c8_every_flipped_bit_is_found() -> None:
    data = b"".join(pack(manifest("k1", "k2")))
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(Damaged):
                unpack(bytes(altered))


def test_c8_every_truncation_is_found() -> None:
    data = b"".join(pack(manifest("k1", "k2")))
    for n_bytes in range(len(data)):
        with pytest.raises(Damaged):
            unpack(data[:n_bytes])
    with pytest.raises(Damaged):
        unpack(data + b"\0")


def test_c8_an_unknown_version_is_named(shelf: SlotFileFolder) -> None:
    (shelf.directory / "a.bin").write_bytes(b"mlx-stack slot file 7\n" + bytes(100))
    with pytest.raises(UnknownVersion, match=r"slot file a\.bin was written by another release"):
        shelf.read("a.bin")


def test_c8_foreign_files_are_refused_and_not_listed(shelf: SlotFileFolder) -> None:
    foreign = shelf.directory / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(Damaged, match=r"notes\.txt is damaged: it is no slot file"):
        shelf.read("notes.txt")
    assert shelf.list() == ()
    assert foreign.read_text() == "mine"


def test_c9_a_link_is_not_followed(shelf: SlotFileFolder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"".join(pack(manifest())))
    before = target.read_bytes()
    (shelf.directory / "a.bin").symlink_to(target)
    with pytest.raises(Damaged, match="symbolic link"):
        shelf.read("a.bin")
    assert shelf.list() == ()
    with pytest.raises(Conflict):
        shelf.write("a.bin", manifest("new"))
    assert target.read_bytes() == before
    assert (shelf.directory / "a.bin").is_symlink()


@pytest.mark.parametrize("content", [b"my thesis\n", b"", b"mlx-stack slot fil"])
def test_another_kind_of_file_is_never_replaced(shelf: SlotFileFolder, content: bytes) -> None:
    path = shelf.directory / "thesis.txt"
    path.write_bytes(content)
    for action in (shelf.check_replaceable, lambda name: shelf.write(name, manifest())):
        with pytest.raises(Conflict, match="is not a slot file"):
            action("thesis.txt")
    assert path.read_bytes() == content
    shelf.check_replaceable("other.bin")
    shelf.write("other.bin", manifest())
    shelf.check_replaceable("other.bin")


def test_damaged_slot_files_are_listed(shelf: SlotFileFolder) -> None:
    n_bytes = shelf.write("a.bin", manifest("k1")) - 1
    os.truncate(shelf.directory / "a.bin", n_bytes)
    with pytest.raises(Damaged):
        shelf.read("a.bin")
    assert [(file.name, file.n_bytes) for file in shelf.list()] == [("a.bin", n_bytes)]


@pytest.mark.parametrize("disk", [FullDisk(0), FullDisk(40), UnsyncableDisk()])
def test_g12_a_refusing_disk_keeps_the_old_file(shelf: SlotFileFolder, disk: FullDisk) -> None:
    shelf.write("a.bin", manifest("old"))
    with pytest.raises(StackError, match=r"a\.bin was not saved: the disk"):
        SlotFileFolder(shelf.directory, disk).write("a.bin", manifest("new"))
    assert shelf.read("a.bin") == manifest("old")
    assert [path.name for path in shelf.directory.iterdir()] == ["a.bin"]


def test_a_folder_in_the_way_is_told(shelf: SlotFileFolder) -> None:
    (shelf.directory / "a.bin").mkdir()
    with pytest.raises(StackError, match=r"a\.bin is not a slot file"):
        shelf.write("a.bin", manifest())


def test_a4_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file/slots"):
        SlotFileFolder(tmp_path / "file" / "slots")
