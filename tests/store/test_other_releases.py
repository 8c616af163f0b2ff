"""Files of another format version: a miss, left as they are, and spared with what they may name."""

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxstack.core.commands import CollectGarbage, GCScope
from mlxstack.core.errors import Conflict, UnknownVersion
from mlxstack.store.kv_store import DiskKVStore
from tests.store.kv_files import IDENTITY, KEY, small_blob
from tests.store.test_disk_quota import NOBODY, House

OTHER = "fedcba9876543210" * 2


def to_next_version(path: Path) -> bytes:
    """The file as a later release would write it; what it holds now."""
    data = path.read_bytes()
    for old, new in (
        (b'"version":"1"', b'"version":"2"'),
        (b'"version":1', b'"version":2,"more":[]'),
        (b"slot file 1\n", b"slot file 2\n"),
    ):
        data = data.replace(old, new)
    about = path.stat()
    path.write_bytes(data)
    os.utime(path, (about.st_atime, about.st_mtime))
    return data


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.*")}


def test_c8_kv_of_another_version_is_a_miss_and_left_as_it_is(tmp_path: Path) -> None:
    vault = DiskKVStore(tmp_path)
    vault.write(small_blob())
    (path,) = tmp_path.rglob("*.safetensors")
    data = to_next_version(path)
    assert list(vault.headers(IDENTITY)) == []
    for read in (vault.head, vault.read, lambda *key: vault.read_into(*key, [])):
        with pytest.raises(UnknownVersion, match="another release"):
            read(IDENTITY, KEY)
    DiskKVStore(tmp_path)
    assert path.read_bytes() == data
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_c14_a_slot_file_of_another_version_forbids_sweeps_in_words(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.store("aa")
    house.save("next.bin", "aa")
    to_next_version(tmp_path / "slots" / "next.bin")
    before = files(tmp_path)
    with pytest.raises(UnknownVersion, match="restore it with that release"):
        house.shelf.read("next.bin")
    for scope in GCScope:
        with pytest.raises(Conflict, match=r"slot file next\.bin .* or delete the file"):
            house.bounded.sweep(CollectGarbage(max_age_s=1, scope=scope), NOBODY)
    assert files(tmp_path) == before


def test_c14_a_context_of_another_version_is_spared_with_the_kv_of_its_identity(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    house.store("aa")
    house.store("bb")
    house.vault.write(replace(small_blob("cc"), identity=OTHER))
    house.keep("next", "aa")
    house.keep("plain", "bb")
    to_next_version(next((tmp_path / "agents" / "next").glob("*/manifest.json")))
    with pytest.raises(UnknownVersion, match="another release"):
        house.agents.read_manifest("next", IDENTITY)
    house._age(next(tmp_path.rglob("cc.safetensors")), 3600)
    house.bounded.sweep(CollectGarbage(max_age_s=100, max_bytes=0), NOBODY)
    assert house.keys() == {"aa", "bb"}
    assert {file.agent for file in house.agents.manifests()} == {"next", "plain"}


def test_c8_a_json_file_that_is_no_manifest_is_not_of_another_version(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.store("aa")
    house.keep("a", "aa")
    path = next((tmp_path / "agents" / "a").glob("*/manifest.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "something"}))
    house.bounded.sweep(CollectGarbage(max_age_s=100), NOBODY)
    assert house.keys() == set(), "a damaged context names nothing"
