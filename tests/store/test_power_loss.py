"""Power loss at every point of saves, parks, history writes and sweeps: one of two states."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import Struct

from mlxstack.core.commands import CollectGarbage
from mlxstack.core.errors import NotFound
from mlxstack.core.interfaces import Manifest
from mlxstack.core.preset import DiskSpec
from mlxstack.store import slot_folder_registry
from mlxstack.store.agent_history import OF_IMAGE, AgentFolders, History, image_name, image_names
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.files import TEMPORARY, Disk
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.repetition import in_soak
from tests.store.kv_files import IDENTITY, manifest, small_blob
from tests.store.power import (
    Medium,
    Op,
    Recorder,
    Survival,
    Tree,
    everything,
    look,
    nothing,
    plant,
    some,
    torn,
)

RECORDERS = {"syncs": Recorder(), "barriers": Recorder(has_barriers=True)}
View = dict[str, object]
"""Every slot file, history and saved context by its name; those that are not there are left out."""


class Fleeting(Disk):
    """Never waits for a medium; for what is looked at and thrown away."""

    def sync(self, fd: int) -> None:
        """Nothing."""


class Rooms:
    """Real stores over one folder."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.vault = DiskKVStore(root / "kv", disk)
        self.shelf = SlotFileFolder(root / "slots", disk)
        self.agents = AgentFolders(root / "agents", disk)
        slot_folder_registry.note(root / "kv", root / "slots", disk)

    def view(self) -> View:
        """Raises Damaged, or AssertionError when a context names KV that is not whole."""
        found: View = {}
        for file in self.shelf.list():
            found[f"slot {file.name}"] = self._whole(self.shelf.peek(file))
        for agent in self.agents.agents():
            history = self.agents.read(agent)
            found[f"history {agent}"] = history
            for name in image_names(history.messages):
                found[f"image {agent} {name}"] = self.agents.image(agent, name)
        for one in self.agents.manifests():
            saved = self.agents.peek_manifest(one.agent, one.model)
            found[f"context {one.agent} {one.model}"] = self._whole(saved)
        return found

    def _whole(self, saved: Manifest) -> Manifest:
        for key in saved.segments:
            try:
                self.vault.read(saved.identity, key)
            except NotFound:
                raise AssertionError(f"{key} of {saved} is not there") from None
        return saved


class Moment(Struct, frozen=True):
    """After `n_ops` operations a step was over, and everything was so."""

    n_ops: int
    step: str
    view: View


def grown(vault: DiskKVStore, *keys: str) -> Manifest:
    for key in keys:
        vault.write(small_blob(key, key.encode() * 20))
    return manifest(*keys, tokens=tuple(range(len(keys) * 9)))


def with_images(*images: bytes) -> History:
    named = {image_name(data): data for data in images}
    shown = [{"type": "image_url", "image_url": {"url": OF_IMAGE + name}} for name in named]
    return History(({"role": "user", "content": shown},), {}, named)


def old(root: Path) -> None:
    for path in root.rglob("*"):
        os.utime(path, (1000, 1000))


def steps(rooms: Rooms) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A life: saved, saved again, parked, forked, swept, forgotten."""
    vault = rooms.vault
    shelf = rooms.shelf
    agents = rooms.agents
    bounded = QuotaKVStore(vault, agents, DiskSpec(max_bytes=3000), clock=lambda: 5000.0)
    said = [History(({"role": "user", "text": "x" * n},)) for n in (10, 4000)]
    seen = [
        with_images(b"first" * 99),
        with_images(b"first" * 99, b"second"),
        with_images(b"third"),
    ]
    yield "save", lambda: shelf.write("a.bin", grown(vault, "aa01", "aa02"))
    yield "save more", lambda: shelf.write("a.bin", grown(vault, "aa01", "aa02", "ab03"))
    yield "save another", lambda: shelf.write("b.bin", grown(vault, "aa01", "ba01"))
    yield "say", lambda: agents.write("bob", said[0])
    yield "park", lambda: agents.write_manifest("bob", IDENTITY, grown(vault, "aa01", "ca01"))
    yield "say more", lambda: agents.write("bob", said[1])
    yield "park again", lambda: agents.write_manifest("bob", IDENTITY, grown(vault, "ca01", "ca02"))
    yield "see", lambda: agents.write("bob", seen[0])
    yield "see more", lambda: agents.write("bob", seen[1])
    yield "see something else", lambda: agents.write("bob", seen[2])
    yield "see it again", lambda: agents.write("bob", seen[0])
    yield "say no more", lambda: agents.write("bob", said[1])
    yield "fork", lambda: agents.write("Eve:2", said[1])
    yield "park the fork", lambda: agents.write_manifest("Eve:2", "beef", grown(vault, "ca01"))
    yield "note", lambda: vault.note(IDENTITY, b"learned")
    yield "forget", lambda: agents.remove("bob")
    yield "come back", lambda: agents.write("bob", said[0])
    yield "park anew", lambda: agents.write_manifest("bob", IDENTITY, grown(vault, "da01"))
    old(rooms.root)
    yield "save fresh", lambda: shelf.write("c.bin", grown(vault, "da01"))
    yield "sweep", lambda: bounded.sweep(CollectGarbage(max_bytes=900), frozenset())
    yield "save after", lambda: shelf.write("a.bin", grown(vault, "ea01", "aa01"))
    old(rooms.root)
    yield "make room", lambda: bounded.make_room(1500, frozenset())


@pytest.fixture(scope="module", params=sorted(RECORDERS))
def life(request: pytest.FixtureRequest) -> tuple[list[Op], list[Moment]]:
    """The operations of a life and its moments. Nothing was done that was not recorded."""
    recorder = RECORDERS[request.param]
    with tempfile.TemporaryDirectory() as folder, recorder.watching(Path(folder)) as ops:
        rooms = Rooms(Path(folder), recorder.disk)
        moments = [Moment(len(ops), "open", rooms.view())]
        for step, action in steps(rooms):
            action()
            moments.append(Moment(len(ops), step, rooms.view()))
        medium = Medium()
        for op in ops:
            medium.take(op)
        assert medium.after(Survival("", everything, everything)) == look(Path(folder))
    return ops, moments


SURVIVALS = [
    Survival("all", everything, everything),
    Survival("none", nothing, nothing),
    Survival("names", everything, nothing),
    Survival("data", nothing, everything),
    Survival("torn", everything, torn),
    Survival("no barrier", everything, everything, 0.0),
    *(Survival(f"chance {n}", some(Random(n)), some(Random(-n)), n / 3) for n in range(1, 3)),
]


@pytest.mark.parametrize(
    "survival", [*SURVIVALS[:-2], *in_soak(*SURVIVALS[-2:])], ids=lambda survival: survival.name
)
def test_c11_power_lost_at_any_point(
    life: tuple[list[Op], list[Moment]], tmp_path: Path, survival: Survival
) -> None:
    ops, moments = life
    medium = Medium()
    now = 0
    seen = []
    for n_done in range(len(ops) + 1):
        while now + 1 < len(moments) and moments[now + 1].n_ops <= n_done:
            now += 1
        if n_done:
            medium.take(ops[n_done - 1])
        if n_done >= moments[0].n_ops:
            is_over = n_done == moments[now].n_ops
            around = moments[now : now + 1 if is_over else now + 2]
        else:
            around = moments[:1]
        tree = medium.after(survival)
        if (tree, around) not in seen[-2:]:
            seen.append((tree, around))
            check(tree, around, tmp_path / str(n_done))
    assert len(seen) > 50


def check(tree: Tree, around: list[Moment], root: Path) -> None:
    """The stores open, nothing half is left, and all is as in one of the moments `around`."""
    plant(tree, root)
    rooms = Rooms(root, Fleeting())
    found = rooms.view()
    for name in {*found, *(name for moment in around for name in moment.view)}:
        states = [moment.view.get(name) for moment in around]
        assert found.get(name) in states, f"{name} in {root}, while: {around[-1].step}"
    assert not [*root.rglob(TEMPORARY + "*")]
    rooms.shelf.write("next.bin", grown(rooms.vault, "aa01", "ff01"))
    assert "slot next.bin" in rooms.view()
    shutil.rmtree(root)
