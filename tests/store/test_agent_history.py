"""The folders of agents: readable history, one manifest per model, distinct safe names."""

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.errors import BadRequest, Damaged, NotFound, StackError, Unreadable
from mlxstack.core.interfaces import Manifest
from mlxstack.store.agent_history import (
    OF_IMAGE,
    AgentFolders,
    History,
    folder_of,
    image_name,
    image_names,
    is_agent,
    name_of,
)
from mlxstack.store.manifest_file import from_json, to_json
from tests.store.bad_disks import FullDisk
from tests.store.kv_files import MANIFESTS, manifest

AGENTS = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)
MODEL = "feed" * 8
HELLO = History(({"role": "user", "text": "Grüß dich"},), {"priority": 1})


@pytest.fixture
def folders(tmp_path: Path) -> AgentFolders:
    return AgentFolders(tmp_path / "agents")


def test_g1_the_layout(folders: AgentFolders) -> None:
    folders.write("coder-1", HELLO)
    folders.write_manifest("coder-1", MODEL, manifest("k1"))
    tree = {str(path.relative_to(folders.root)) for path in folders.root.rglob("*.json")}
    assert tree == {"coder-1/history.json", f"coder-1/{MODEL}/manifest.json"}


def test_g1_the_history_is_readable_without_us(folders: AgentFolders) -> None:
    folders.write("coder-1", HELLO)
    text = (folders.root / "coder-1" / "history.json").read_text()
    assert "Grüß dich" in text
    assert len(text.splitlines()) > 5
    assert json.loads(text)["messages"] == list(HELLO.messages)
    assert folders.read("coder-1") == HELLO


def test_an_agent_is_there_as_long_as_its_history_is_sound_or_not(folders: AgentFolders) -> None:
    assert not folders.has("a")
    folders.write("a", HELLO)
    (folders.root / "a" / "history.json").write_text("{")
    assert folders.has("a")
    folders.remove("a")
    folders.write_manifest("a", MODEL, manifest())
    assert not folders.has("a")
    (folders.root / "b").symlink_to(folders.root / "b")
    with pytest.raises(Unreadable, match="agent b cannot be read"):
        folders.has("b")


def test_g1_a_history_edited_by_hand_is_read(folders: AgentFolders) -> None:
    folders.write("a", HELLO)
    path = folders.root / "a" / "history.json"
    path.write_text(path.read_text().replace("Grüß dich", "hello"))
    assert folders.read("a").messages[0]["text"] == "hello"


def test_g12_files_are_0600_and_folders_0700(folders: AgentFolders) -> None:
    folders.write("a", HELLO)
    folders.write_manifest("a", MODEL, manifest())
    for path in (folders.root, *folders.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@given(AGENTS)
def test_g12_any_agent_has_a_folder_that_leads_back_to_it(agent: str) -> None:
    folder = folder_of(agent)
    assert name_of(folder) == agent
    assert folder == folder.lower()
    assert not folder.startswith(".")
    assert len(folder) <= 161
    assert not set(folder) & set('/\\:*?"<>|')


@given(AGENTS, AGENTS)
def test_g12_no_two_agents_share_a_folder(one: str, other: str) -> None:
    assert (folder_of(one) == folder_of(other)) == (one == other)


@given(st.text(max_size=20))
def test_a_foreign_folder_is_nobodys(folder: str) -> None:
    agent = name_of(folder)
    assert agent is None or (is_agent(agent) and folder_of(agent) == folder)


def test_the_folder_names_of_odd_ids() -> None:
    odd = [".", "..", "Bob:1", "bob:1", "...x", "--", "A" * 128]
    assert [folder_of(agent) for agent in odd] == [
        "+", "+.", "bob=1~1", "bob=1", "+..x", "--", "a" * 128 + "~" + "f" * 32,
    ]  # fmt: skip


@pytest.mark.parametrize("agent", ["", "a/b", "a b", "é", "x" * 129, "a\n", "a\0"])
def test_g12_an_impossible_agent_is_refused(folders: AgentFolders, agent: str) -> None:
    for action in (
        lambda: folders.write(agent, HELLO),
        lambda: folders.read(agent),
        lambda: folders.write_manifest(agent, MODEL, manifest()),
        lambda: folders.remove(agent),
    ):
        with pytest.raises(BadRequest, match="1 to 128"):
            action()
    assert list(folders.root.iterdir()) == []


def test_a_model_that_is_no_key_is_refused(folders: AgentFolders) -> None:
    with pytest.raises(StackError, match="not the key"):
        folders.write_manifest("a", "../../x", manifest())


def test_g5_each_model_has_its_own_manifest(folders: AgentFolders) -> None:
    folders.write_manifest("a", "aa", manifest("k1"))
    folders.write_manifest("a", "bb", manifest("k2"))
    assert folders.read_manifest("a", "aa") == manifest("k1")
    assert folders.read_manifest("a", "bb") == manifest("k2")
    assert [(file.agent, file.model) for file in folders.manifests()] == [("a", "aa"), ("a", "bb")]


def test_what_is_missing_is_named(folders: AgentFolders) -> None:
    with pytest.raises(NotFound, match="history of agent a"):
        folders.read("a")
    with pytest.raises(NotFound, match="saved context of agent a"):
        folders.read_manifest("a", MODEL)
    with pytest.raises(NotFound, match="no agent a"):
        folders.remove("a")


def test_listing_and_removing(folders: AgentFolders) -> None:
    for agent in ("Zoe", "a:1", "."):
        folders.write(agent, HELLO)
    (folders.root / "Not An Agent").mkdir()
    assert folders.agents() == (".", "Zoe", "a:1")
    folders.remove("Zoe")
    assert folders.agents() == (".", "a:1")


def test_reading_a_manifest_is_using_it(folders: AgentFolders) -> None:
    folders.write_manifest("a", MODEL, manifest())
    path = folders.manifests()[0].path
    os.utime(path, (1000, 1000))
    folders.peek_manifest("a", MODEL)
    assert folders.manifests()[0].used_at == 1000
    folders.read_manifest("a", MODEL)
    assert folders.manifests()[0].used_at > 1000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version":2}', '"x"', "\0"])
def test_c8_a_broken_history_is_told(folders: AgentFolders, text: str) -> None:
    folders.write("a", HELLO)
    (folders.root / "a" / "history.json").write_text(text)
    with pytest.raises(Damaged, match="history of agent a is damaged"):
        folders.read("a")


def test_a_history_of_another_agent_is_told(folders: AgentFolders) -> None:
    folders.write("a", HELLO)
    (folders.root / "a").rename(folders.root / "b")
    with pytest.raises(Damaged, match="version 1 of agent a"):
        folders.read("b")


@given(MANIFESTS)
def test_any_manifest_survives_as_json(saved: Manifest) -> None:
    assert from_json(to_json(saved)) == saved


def test_c8_every_flipped_bit_of_a_manifest_is_found() -> None:
    data = to_json(manifest("k1", "k2"))
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(Damaged):
                from_json(bytes(altered))


def test_c8_every_truncation_of_a_manifest_is_found() -> None:
    data = to_json(manifest("k1", "k2"))
    for n_bytes in range(len(data)):
        with pytest.raises(Damaged):
            from_json(data[:n_bytes])


def shown(*images: bytes, stored: bool = False) -> History:
    """A history that shows these images; those that are `stored` come without their bytes."""
    named = {image_name(data): data for data in images}
    parts = [{"type": "image_url", "image_url": {"url": OF_IMAGE + name}} for name in named]
    return History(({"role": "user", "content": parts},), {}, {} if stored else named)


def image_files(folders: AgentFolders, agent: str) -> dict[str, int]:
    """Inode numbers of the images of an agent by their names."""
    found = (folders.root / agent / "images").glob("*")
    return {path.name: path.stat().st_ino for path in found}


def test_an_image_is_stored_once_and_goes_with_its_last_name(folders: AgentFolders) -> None:
    first = b"first" * 1000
    second = b"second" * 1000
    folders.write("a", shown(first, first, second))
    before = image_files(folders, "a")
    assert before.keys() == {image_name(first), image_name(second)}
    assert (folders.root / "a" / "history.json").stat().st_size < 1000
    assert folders.image("a", image_name(first)) == first
    for is_stored in (False, True):
        folders.write("a", shown(first, second, stored=is_stored))
        assert image_files(folders, "a") == before, "nothing was written again"
    folders.write("a", shown(second, stored=True))
    assert image_files(folders, "a").keys() == {image_name(second)}
    folders.write("a", HELLO)
    assert image_files(folders, "a") == {}
    assert folders.manifests() == ()
    folders.write("a", shown(first))
    folders.remove("a")
    assert not (folders.root / "a").exists()


def test_an_image_that_is_damaged_or_missing_is_told(folders: AgentFolders) -> None:
    folders.write("a", shown(b"picture"))
    name = image_name(b"picture")
    path = folders.root / "a" / "images" / name
    path.write_bytes(b"pictur!")
    with pytest.raises(Damaged, match=f"image {name[:12]} of agent a is damaged"):
        folders.image("a", name)
    path.unlink()
    with pytest.raises(Damaged, match="no image"):
        folders.image("a", name)
    with pytest.raises(StackError, match="an image is missing"):
        folders.write("a", shown(b"picture", stored=True))
    assert image_names(folders.read("a").messages) == {name}


def test_a_full_disk_keeps_the_old_history_and_its_images(folders: AgentFolders) -> None:
    folders.write("a", shown(b"old"))
    with pytest.raises(StackError, match="the disk is full"):
        AgentFolders(folders.root, FullDisk(10)).write("a", shown(b"new" * 100))
    assert image_names(folders.read("a").messages) == {image_name(b"old")}
    assert folders.image("a", image_name(b"old")) == b"old"


def test_g12_a_full_disk_keeps_the_old_history(folders: AgentFolders) -> None:
    folders.write("a", HELLO)
    with pytest.raises(StackError, match=r"history\.json was not saved: the disk is full"):
        AgentFolders(folders.root, FullDisk(10)).write("a", History())
    assert folders.read("a") == HELLO
