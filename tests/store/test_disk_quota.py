"""The vault that stays below its bounds (C14): what goes, what stays, what is refused."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.commands import CollectGarbage, GCScope
from mlxstack.core.errors import BadRequest, Conflict, DiskFull
from mlxstack.core.interfaces import Manifest
from mlxstack.core.preset import DiskSpec
from mlxstack.store import slot_folder_registry
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.gc import MIN_FREE_PCT, VolumeSpace, automatic_limit
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.store.kv_files import IDENTITY, small_blob

HOUR = 3600.0
NOBODY: frozenset[tuple[str, str]] = frozenset()


class House:
    """A vault with one slot folder, and files as old as wished."""

    def __init__(self, root: Path, **disk: int | None) -> None:
        self.vault = DiskKVStore(root / "kv")
        self.shelf = SlotFileFolder(root / "slots")
        slot_folder_registry.note(root / "kv", root / "slots")
        self.agents = AgentFolders(root / "agents")
        self.bounded = QuotaKVStore(self.vault, self.agents, DiskSpec(**disk))

    def store(self, key: str, age_s: float = HOUR) -> int:
        """Write a blob that was last used so long ago; the bytes of its file."""
        one = small_blob(key)
        self.vault.write(one)
        found = next(e for e in self.vault.entries() if e.key == key)
        self._age(Path(found.path), age_s)
        return found.n_bytes

    def save(self, name: str, *keys: str, age_s: float = HOUR) -> None:
        self.shelf.write(name, Manifest(identity=IDENTITY, tokens=(1,), segments=keys))
        self._age(self.shelf.directory / name, age_s)

    def keep(self, agent: str, *keys: str, age_s: float = HOUR) -> None:
        self.agents.write_manifest(agent, IDENTITY, Manifest(IDENTITY, (1,), keys))
        for file in self.agents.manifests():
            self._age(Path(file.path), age_s)

    def keys(self) -> set[str]:
        return {entry.key for entry in self.vault.entries()}

    def _age(self, path: Path, age_s: float) -> None:
        then = time.time() - age_s
        os.utime(path, (then, then))


def test_c14_at_the_limit_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    n_bytes = House(tmp_path / "one").store("aa")
    house = House(tmp_path, max_bytes=3 * n_bytes)
    for number, key in enumerate(("aa", "bb", "cc")):
        house.store(key, age_s=HOUR * (3 - number))
    swept = house.bounded.make_room(n_bytes, NOBODY)
    assert house.keys() == {"bb", "cc"}
    assert [victim.ref for victim in swept.victims] == [(IDENTITY, "aa")]


def test_c14_what_is_in_use_or_fresh_never_goes_and_the_save_is_refused_before_writing(
    tmp_path: Path,
) -> None:
    n_bytes = House(tmp_path / "one").store("aa")
    house = House(tmp_path, max_bytes=2 * n_bytes)
    house.store("aa")
    house.store("bb", age_s=0)
    with pytest.raises(DiskFull, match="max_bytes"):
        house.bounded.make_room(n_bytes, frozenset({(IDENTITY, "aa")}))
    with pytest.raises(DiskFull):
        house.bounded.make_room(3 * n_bytes, NOBODY)
    assert house.keys() == {"aa", "bb"}


def test_c14_cache_gc_leaves_saved_slots_alone_and_slots_gc_does_not(tmp_path: Path) -> None:
    house = House(tmp_path)
    for key in ("aa", "bb"):
        house.store(key)
    house.save("a.bin", "aa")
    house.bounded.sweep(CollectGarbage(max_bytes=0, scope=GCScope.KV), NOBODY)
    assert house.keys() == {"aa"}
    dry = house.bounded.sweep(CollectGarbage(max_bytes=0, is_dry=True), NOBODY)
    assert {victim.title for victim in dry.victims} == {"slot file a.bin", "KV aa"}
    assert house.keys() == {"aa"}
    done = house.bounded.sweep(CollectGarbage(max_bytes=0), NOBODY)
    assert done.victims == dry.victims
    assert not house.keys()
    assert not house.shelf.list()


def test_c14_the_presets_own_bounds_hold_when_none_is_given(tmp_path: Path) -> None:
    house = House(tmp_path, max_age_s=int(2 * HOUR))
    house.store("aa", age_s=3 * HOUR)
    house.store("bb", age_s=HOUR)
    house.bounded.sweep(CollectGarbage(), NOBODY)
    assert house.keys() == {"bb"}
    with pytest.raises(BadRequest, match="nothing bounds"):
        House(tmp_path / "free", max_bytes=None).bounded.sweep(CollectGarbage(), NOBODY)


def test_c14_kv_that_any_noted_folder_names_stays(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.store("aa")
    other = SlotFileFolder(tmp_path / "elsewhere")
    slot_folder_registry.note(tmp_path / "kv", tmp_path / "elsewhere")
    other.write("b.bin", Manifest(IDENTITY, (1,), ("aa",)))
    house.bounded.sweep(CollectGarbage(max_bytes=0, scope=GCScope.KV), NOBODY)
    assert house.keys() == {"aa"}


def test_c14_nothing_goes_while_a_slot_folder_is_unplugged(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.store("aa")
    file = next((tmp_path / "kv" / "shelves").iterdir())
    file.write_text("/mnt/no-such-drive/slots")
    with pytest.raises(Conflict, match="no-such-drive"):
        house.bounded.sweep(CollectGarbage(max_bytes=0), NOBODY)
    file.write_text(str(tmp_path / "deleted" / "slots"))
    house.bounded.sweep(CollectGarbage(max_bytes=0), NOBODY)
    assert not house.keys()


def test_c14_of_one_agent_goes_what_nobody_else_has_saved(tmp_path: Path) -> None:
    house = House(tmp_path)
    for key in ("aa", "bb", "cc", "dd"):
        house.store(key)
    house.keep("planner", "aa", "bb")
    house.keep("critic", "aa", "cc")
    own = house.bounded.sweep(CollectGarbage(max_bytes=0, agent="planner", is_dry=True), NOBODY)
    assert own.n_after == 0
    assert own.n_before == sum(victim.n_bytes for victim in own.victims)
    house.bounded.sweep(CollectGarbage(max_bytes=own.n_before, agent="planner"), NOBODY)
    assert house.keys() == {"aa", "bb", "cc", "dd"}
    house.bounded.sweep(CollectGarbage(max_bytes=0, agent="planner"), NOBODY)
    assert house.keys() == {"aa", "cc", "dd"}
    assert [file.agent for file in house.agents.manifests()] == ["critic"]
    with pytest.raises(BadRequest, match="--max-bytes or --older-than"):
        house.bounded.sweep(CollectGarbage(agent="planner"), NOBODY)


class Volume:
    """A volume of 10,000 bytes, on which KV and `n_others` bytes of other programs lie."""

    def __init__(self, house: House, n_others: int) -> None:
        self.house = house
        self.n_others = n_others

    def space(self, _: Path) -> VolumeSpace:
        n_kv = sum(entry.n_bytes for entry in self.house.vault.entries())
        return VolumeSpace(10_000 - self.n_others - n_kv, 10_000)


def automatic(house: House, volume: Volume) -> QuotaKVStore:
    return QuotaKVStore(house.vault, house.agents, DiskSpec(), space=volume.space)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**7))
def test_auto_never_takes_the_part_that_stays_free(n_used: int, n_free: int, n_total: int) -> None:
    space = VolumeSpace(min(n_free, n_total), n_total)
    limit = automatic_limit(n_used, space)
    free_at_limit = space.n_free - (limit - n_used)
    assert limit == 0 or free_at_limit * 100 >= MIN_FREE_PCT * n_total
    assert limit == 0 or (free_at_limit - 1) * 100 < MIN_FREE_PCT * n_total


def test_auto_makes_room_by_what_was_used_least_recently(tmp_path: Path) -> None:
    house = House(tmp_path)
    n_bytes = house.store("aa", age_s=2 * HOUR)
    house.store("bb")
    volume = Volume(house, 9000 - 2 * n_bytes)
    automatic(house, volume).make_room(n_bytes, NOBODY)
    assert house.keys() == {"bb"}
    with pytest.raises(DiskFull, match="10 percent of the volume"):
        automatic(house, volume).make_room(9000, NOBODY)


def test_auto_gives_back_what_other_programs_took(tmp_path: Path) -> None:
    house = House(tmp_path)
    n_bytes = house.store("aa", age_s=2 * HOUR)
    house.store("bb")
    volume = Volume(house, 9000 - 2 * n_bytes)
    automatic(house, volume).sweep(CollectGarbage(), NOBODY)
    assert house.keys() == {"aa", "bb"}
    volume.n_others += 1
    automatic(house, volume).sweep(CollectGarbage(), NOBODY)
    assert house.keys() == {"bb"}
