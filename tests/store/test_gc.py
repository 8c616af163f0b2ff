"""Sweeping: the goal is reached whenever it can be, and nothing needed ever goes."""

import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.errors import Conflict, DiskFull
from mlxstack.store import slot_files, slot_folder_registry
from mlxstack.store.agent_history import AgentFolders, History
from mlxstack.store.files import Disk, children
from mlxstack.store.gc import (
    DiskInventory,
    GCPlan,
    GCReason,
    GCRules,
    StoredContext,
    carry_out,
    check_room,
    plan,
    scan_disk,
)
from mlxstack.store.kv_store import DiskKVStore, KVFileEntry
from mlxstack.store.slot_files import SlotFileFolder
from tests.store.bad_disks import UnreadableDisk
from tests.store.kv_files import IDENTITY, manifest, small_blob

NOW = 10_000.0
TIMES = st.floats(0, NOW)
SIZES = st.integers(1, 1000)


def entry(number: int, n_bytes: int = 10, used_at: float = 0.0) -> KVFileEntry:
    return KVFileEntry("id", str(number), f"kv/{number}", n_bytes, used_at)


def context(name: str, *numbers: int, n_bytes: int = 1, used_at: float = 0.0) -> StoredContext:
    refs = frozenset(("id", str(number)) for number in numbers)
    return StoredContext(name, f"slots/{name}", n_bytes, used_at, refs)


REFS = st.frozensets(st.integers(0, 12).map(lambda number: ("id", str(number))))
STOCKS = st.builds(
    lambda blobs, contexts, in_use, spared: DiskInventory(
        tuple(entry(number, *about) for number, about in enumerate(blobs)),
        tuple(
            StoredContext(f"c{number}", f"slots/{number}", *about)
            for number, about in enumerate(contexts)
        ),
        in_use,
        frozenset(f"slots/{number}" for number in spared),
    ),
    st.lists(st.tuples(SIZES, TIMES), max_size=10),
    st.lists(st.tuples(SIZES, TIMES, REFS), max_size=6),
    REFS,
    st.sets(st.integers(0, 6)),
)
RULES = st.builds(
    GCRules,
    max_bytes=st.none() | st.integers(0, 6000),
    max_age_s=st.none() | st.floats(1, NOW),
    n_wanted=st.integers(0, 500),
    grace_s=st.floats(0, NOW / 2),
)


def gone(decided: GCPlan) -> set[str]:
    return {doomed.item.path for doomed in decided.files}


def remaining(
    stock: DiskInventory, decided: GCPlan
) -> tuple[list[KVFileEntry], list[StoredContext]]:
    lost = gone(decided)
    blobs = [blob for blob in stock.files if blob.path not in lost]
    return blobs, [one for one in stock.contexts if one.path not in lost]


@given(STOCKS, RULES)
def test_c14_nothing_in_use_named_or_fresh_goes(stock: DiskInventory, rules: GCRules) -> None:
    decided = plan(stock, rules, NOW)
    _, contexts = remaining(stock, decided)
    named = frozenset[tuple[str, str]]().union(*(one.refs for one in contexts))
    for doomed in decided.files:
        assert doomed.item.path not in stock.protected
        assert doomed.used_at < NOW - rules.grace_s
        assert doomed.item.ref is None or doomed.item.ref not in named | stock.in_use


@given(STOCKS, RULES)
def test_c14_the_goal_is_reached_unless_the_rest_is_needed(
    stock: DiskInventory, rules: GCRules
) -> None:
    decided = plan(stock, rules, NOW)
    blobs, contexts = remaining(stock, decided)
    n_bytes = sum(blob.n_bytes for blob in blobs) + sum(one.n_bytes for one in contexts)
    assert decided.n_after == n_bytes
    assert decided.n_before == n_bytes + sum(doomed.item.n_bytes for doomed in decided.files)
    if rules.max_bytes is None:
        assert decided.n_over == 0
        return
    assert decided.n_over == max(0, n_bytes - (rules.max_bytes - rules.n_wanted))
    if not decided.n_over:
        return
    fresh = NOW - rules.grace_s
    named = frozenset[tuple[str, str]]().union(*(one.refs for one in contexts))
    assert all(one.path in stock.protected or one.used_at >= fresh for one in contexts)
    for blob in blobs:
        ref = (blob.identity, blob.key)
        assert ref in named | stock.in_use or blob.used_at >= fresh


@given(STOCKS, RULES)
def test_c14_nothing_goes_for_bytes_that_need_not(stock: DiskInventory, rules: GCRules) -> None:
    decided = plan(stock, rules, NOW)
    items = [doomed.item for doomed in decided.files]
    for_bytes = [item for item in items if item.reason == GCReason.BYTES]
    if rules.max_bytes is None:
        assert for_bytes == []
    elif for_bytes and not decided.n_over:
        # Oldest first and not the fewest: without the one that went last it was too much.
        largest = max(item.n_bytes for item in for_bytes)
        assert decided.n_after + largest > rules.max_bytes - rules.n_wanted


@given(STOCKS, st.floats(1, NOW))
def test_c14_after_age_nothing_loose_is_old(stock: DiskInventory, max_age_s: float) -> None:
    decided = plan(stock, GCRules(max_age_s=max_age_s, grace_s=0), NOW)
    blobs, contexts = remaining(stock, decided)
    assert all(one.used_at >= NOW - max_age_s or one.path in stock.protected for one in contexts)
    named = frozenset[tuple[str, str]]().union(*(one.refs for one in contexts))
    for blob in blobs:
        is_needed = (blob.identity, blob.key) in named | stock.in_use
        assert is_needed or blob.used_at >= NOW - max_age_s


@given(STOCKS)
def test_no_rule_no_victim(stock: DiskInventory) -> None:
    assert plan(stock, GCRules(), NOW).files == ()


def test_c14_unnamed_files_go_first_the_least_recently_used_before_the_others() -> None:
    blobs = (entry(1, used_at=900), entry(2, used_at=100), entry(3, used_at=500), entry(4))
    stock = DiskInventory(blobs, (context("named", 4),))
    assert gone(plan(stock, GCRules(max_bytes=21), NOW)) == {"kv/2", "kv/3"}


def test_a_chain_goes_tail_first() -> None:
    blobs = tuple(entry(number, used_at=600 + number / 10) for number in range(4))
    assert gone(plan(DiskInventory(blobs), GCRules(max_bytes=20), NOW)) == {"kv/2", "kv/3"}


def test_a_context_goes_with_what_only_it_names() -> None:
    contexts = (context("old", 1, 2, used_at=5), context("new", 2, 3, used_at=9))
    decided = plan(
        DiskInventory((entry(1), entry(2), entry(3)), contexts), GCRules(max_bytes=21), NOW
    )
    assert [doomed.item.path for doomed in decided.files] == ["slots/old", "kv/1"]


def test_a_context_whose_end_frees_nothing_is_spared() -> None:
    contexts = (context("shared", 1, used_at=1), context("own", 2, used_at=2))
    stock = DiskInventory((entry(1), entry(2)), contexts, in_use=frozenset({("id", "1")}))
    assert gone(plan(stock, GCRules(max_bytes=12), NOW)) == {"slots/own", "kv/2"}


def test_c14_a_save_over_the_limit_is_refused_before_writing() -> None:
    stock = DiskInventory((entry(1, 100),), in_use=frozenset({("id", "1")}))
    check_room(plan(stock, GCRules(max_bytes=150, n_wanted=50), NOW))
    with pytest.raises(DiskFull, match="exceeded by 10 bytes"):
        check_room(plan(stock, GCRules(max_bytes=150, n_wanted=60), NOW))


class House:
    """A vault, a shelf and agents on a real disk."""

    def __init__(self, root: Path) -> None:
        self.vault = DiskKVStore(root / "kv")
        self.shelf = SlotFileFolder(root / "slots")
        self.agents = AgentFolders(root / "agents")
        for number in range(5):
            self.vault.write(small_blob(f"{number:04x}"))
        self.shelf.write("a.bin", manifest("0000", "0001"))
        self.agents.write("bob", History())
        self.agents.write_manifest("bob", "feed", manifest("0001", "0002"))
        for path in root.rglob("*.*"):
            os.utime(path, (1000, 1000))

    def stock(self) -> DiskInventory:
        return scan_disk(self.vault, [self.shelf], self.agents)

    def keys(self) -> set[str]:
        return {entry.key for entry in self.vault.entries()}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_stock_names_slot_files_and_agents(house: House) -> None:
    stock = house.stock()
    assert len(stock.files) == 5
    assert {one.title: {key for _, key in one.refs} for one in stock.contexts} == {
        "slot file a.bin": {"0000", "0001"},
        "agent bob (feed)": {"0001", "0002"},
    }
    assert all(one.used_at == 1000 for one in (*stock.files, *stock.contexts))


def test_a_scan_lists_a_slot_folder_once_however_many_files_it_has(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []

    def counted(folder: Path) -> list[Path]:
        listed.append(folder)
        return children(folder)

    for number in range(20):
        house.shelf.write(f"b{number}.bin", manifest("0002"))
    monkeypatch.setattr(slot_files, "children", counted)
    assert len(house.stock().contexts) == 22
    assert listed == [house.shelf.directory]


def test_c14_a_plan_touches_nothing_and_carrying_it_out_does(house: House) -> None:
    stock = house.stock()
    limit = plan(stock, GCRules(), NOW).n_before - 2 * stock.files[0].n_bytes
    decided = plan(stock, GCRules(max_bytes=limit), NOW)
    assert len(house.keys()) == 5
    swept = carry_out(decided, Disk())
    assert (len(swept.victims), swept.skipped) == (2, ())
    assert (swept.n_before, swept.n_after) == (decided.n_before, decided.n_after)
    assert house.keys() == {"0000", "0001", "0002"}
    assert house.shelf.read("a.bin") == manifest("0000", "0001")


def test_c14_everything_old_goes_but_the_history(house: House) -> None:
    carry_out(plan(house.stock(), GCRules(max_age_s=60), time.time()), Disk())
    assert house.keys() == set()
    assert house.shelf.list() == ()
    assert house.agents.manifests() == ()
    assert house.agents.read("bob") == History()


def test_what_is_used_after_the_plan_stays_with_its_files(house: House) -> None:
    decided = plan(house.stock(), GCRules(max_bytes=0), NOW)
    house.shelf.read("a.bin")
    house.vault.has(IDENTITY, "0004")
    swept = carry_out(decided, Disk())
    assert house.keys() == {"0000", "0001", "0004"}
    assert len(swept.skipped) == 4
    assert any("used meanwhile" in line for line in swept.skipped)
    assert carry_out(decided, Disk()).n_after == decided.n_before


def test_a_damaged_context_names_nothing(house: House) -> None:
    os.truncate(house.shelf.directory / "a.bin", 40)
    refs = {one.title: one.refs for one in house.stock().contexts}
    assert refs["slot file a.bin"] == frozenset()


@pytest.mark.parametrize("which", ["slots", "agents"])
def test_c14_a_context_that_cannot_be_read_now_forbids_every_sweep(
    house: House, which: str
) -> None:
    root = house.vault.root.parent
    bad = UnreadableDisk()
    shelf = SlotFileFolder(root / "slots", bad if which == "slots" else None)
    agents = AgentFolders(root / "agents", bad if which == "agents" else None)
    with pytest.raises(Conflict, match=r"nothing was deleted: .*input/output error"):
        scan_disk(house.vault, [shelf], agents)


@pytest.mark.parametrize("which", ["slots", "agents", "agents/someone"])
def test_c14_a_folder_that_cannot_be_looked_into_forbids_every_sweep(
    house: House, which: str
) -> None:
    root = house.vault.root.parent
    agents = AgentFolders(root / "agents")
    turned = root / which
    shutil.rmtree(turned, ignore_errors=True)
    turned.symlink_to(turned)
    with pytest.raises(Conflict, match=r"nothing was deleted: .*cannot be read"):
        scan_disk(house.vault, [house.shelf], agents)


def test_c14_a_clock_that_was_set_back_takes_nothing_that_was_used_since(house: House) -> None:
    for path in house.vault.root.parent.rglob("*.*"):
        os.utime(path, (NOW, NOW))
    decided = plan(house.stock(), GCRules(max_bytes=1, max_age_s=60), now=NOW - 5000)
    assert decided.files == ()
    assert len(plan(house.stock(), GCRules(max_age_s=60), now=NOW + 5000).files) > 0


def test_c14_a_list_of_shelves_that_cannot_be_read_forbids_every_sweep(tmp_path: Path) -> None:
    slot_folder_registry.note(tmp_path, tmp_path / "slots")
    folder = tmp_path / slot_folder_registry.FOLDER
    (folder / ".DS_Store").write_bytes(b"\xff")
    assert slot_folder_registry.known(tmp_path) == ()
    note = next(file for file in folder.iterdir() if slot_folder_registry.NOTE.fullmatch(file.name))
    note.write_bytes(b"")
    with pytest.raises(Conflict, match=r"nothing was deleted: .*path of a slot folder"):
        slot_folder_registry.known(tmp_path)
    note.unlink()
    note.symlink_to(note)
    with pytest.raises(Conflict, match=r"nothing was deleted: .*link"):
        slot_folder_registry.known(tmp_path)
    shutil.rmtree(folder)
    folder.symlink_to(folder)
    with pytest.raises(Conflict, match=r"nothing was deleted: .*cannot be read"):
        slot_folder_registry.known(tmp_path)
