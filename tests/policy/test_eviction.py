"""Who goes first, who never goes, and that paths stay whole."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.preset import EvictionPolicy
from mlxstack.policy.kv.eviction import (
    EvictionCandidate,
    EvictionClass,
    EvictionGoal,
    MemoryPressure,
    entries,
    plan,
)
from mlxstack.policy.kv.prefix_index import StorageTier
from mlxstack.policy.kv.prefix_index_check import check_index, n_entries
from mlxstack.policy.kv.retention import PinnedPrefixName, Retention
from tests.policy.index_memory import Memory

LRU = EvictionPolicy.LRU
FREQUENCY = EvictionPolicy.LRU_FREQUENCY


def evict(memory: Memory, goal: EvictionGoal) -> int:
    """Drop what the plan says; how many records went."""
    keys = plan(entries(memory.index), goal)
    for key in keys:
        memory.index.drop(key, StorageTier.MEMORY)
    check_index(memory.index)
    return len(keys)


def scan(memory: Memory, n: int, start: float) -> None:
    """Cold prompts that nobody will send again, a second apart."""
    for i in range(n):
        memory.save([100 + i] * 8, now=start + i)


def test_d5_a_hot_prefix_survives_a_scan_with_frequency_and_not_without() -> None:
    survived = {}
    for policy in (FREQUENCY, LRU):
        memory = Memory()
        hot = memory.save([1] * 8, now=0.0)
        for i in range(50):
            memory.index.touch(hot, now=float(i))
        scan(memory, 100, start=60.0)
        evict(memory, EvictionGoal(n_bytes=50 * 8, policy=policy))
        survived[policy] = memory.match([1] * 8).covered
    assert survived == {FREQUENCY: 8, LRU: 0}


def test_d5_a_hot_prefix_that_nobody_used_for_hours_goes_after_all() -> None:
    memory = Memory()
    hot = memory.save([1] * 8, now=0.0)
    for _ in range(50):
        memory.index.touch(hot, now=0.0)
    scan(memory, 5, start=7200.0)
    evict(memory, EvictionGoal(n_bytes=8))
    assert memory.match([1] * 8).covered == 0


def test_d6_max_entries_five_of_six_stay() -> None:
    memory = Memory()
    scan(memory, 6, start=0.0)
    assert evict(memory, EvictionGoal(max_entries=5)) == 1
    assert n_entries(memory.index) == 5
    assert memory.index.n_evicted == 1
    assert memory.match([100] * 8).covered == 0
    assert evict(memory, EvictionGoal(max_entries=5)) == 0


def test_d7_used_written_and_pinned_records_are_never_listed() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    used, written, pinned = (memory.save([i] * 8)[0] for i in range(3))
    memory.index.lock([used])
    memory.index.set_writing(written, True)
    owners.pin(PinnedPrefixName("system", (pinned,), 8, since=0.0))
    assert (
        plan(entries(memory.index), EvictionGoal(10**9, 0, pressure=MemoryPressure.CRITICAL)) == ()
    )


def test_d8_pressure_drops_the_cold_then_the_shared_never_the_pinned() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    shared = memory.save([1] * 8)
    pinned = memory.save([2] * 8)
    scan(memory, 10, start=0.0)
    for agent in ("a", "b"):
        owners.claim(agent, shared[-1])
    owners.pin(PinnedPrefixName("system", tuple(pinned), 8, since=0.0))
    assert evict(memory, EvictionGoal()) == 0
    assert evict(memory, EvictionGoal(pressure=MemoryPressure.HIGH)) == 10
    assert evict(memory, EvictionGoal(pressure=MemoryPressure.CRITICAL)) == 1
    assert set(memory.index.nodes) == set(pinned)


def test_superseded_states_go_before_older_cold_ones() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    memory.save([1] * 8, now=0.0)
    left = memory.save([2] * 8, now=100.0)
    owners.claim("a", left[-1])
    owners.claim("a", memory.save([3] * 8, now=200.0)[-1])
    assert plan(entries(memory.index), EvictionGoal(n_bytes=1)) == (left[-1],)


def test_a_checkpoint_goes_before_the_segment_that_carries_it() -> None:
    memory = Memory()
    path = memory.save([1] * 8)
    checkpoint = memory.checkpoint([1] * 8, n_bytes=100)
    assert plan(entries(memory.index), EvictionGoal(n_bytes=50)) == (checkpoint,)
    assert plan(entries(memory.index), EvictionGoal(n_bytes=108)) == (checkpoint, *path)


def test_a_record_in_memory_only_stays_while_stored_ones_need_it() -> None:
    memory = Memory()
    root, leaf = memory.save([1] * 8, longest=4)
    memory.index.insert(memory.index.nodes[leaf].record, StorageTier.DISK, 0.0)
    memory.index.drop(leaf, StorageTier.MEMORY)
    assert plan(entries(memory.index), EvictionGoal(n_bytes=99)) == ()
    memory.index.insert(memory.index.nodes[root].record, StorageTier.DISK, 0.0)
    assert plan(entries(memory.index), EvictionGoal(n_bytes=99)) == (root,)


@st.composite
def forests(draw: st.DrawFn) -> list[EvictionCandidate]:
    """Entries whose `needs` form a forest, with a few that may not go."""
    n = draw(st.integers(0, 25))
    return [
        EvictionCandidate(
            key=str(i),
            n_bytes=draw(st.integers(1, 100)),
            needs=draw(st.sampled_from([None, *map(str, range(i))])),
            hits=draw(st.integers(0, 50)),
            used_at=draw(st.floats(0, 10_000)),
            rank=draw(st.sampled_from(list(EvictionClass))),
            is_fixed=draw(st.integers(0, 5)) == 0,
            is_entry=draw(st.booleans()),
        )
        for i in range(n)
    ]


goals = st.builds(
    EvictionGoal,
    n_bytes=st.integers(0, 1500),
    max_entries=st.none() | st.integers(0, 20),
    policy=st.sampled_from(EvictionPolicy),
    pressure=st.sampled_from(MemoryPressure),
)


@given(forest=forests(), goal=goals)
def test_f6_a_plan_keeps_paths_whole_and_stops_when_the_goal_is_met(
    forest: list[EvictionCandidate], goal: EvictionGoal
) -> None:
    known = {entry.key: entry for entry in forest}
    gone: set[str] = set()
    for key in plan(forest, goal):
        assert not known[key].is_fixed
        assert all(e.key in gone for e in forest if e.needs == key), "something still needs it"
        gone.add(key)
    left = [entry for entry in forest if entry.key not in gone]
    freed = sum(known[key].n_bytes for key in gone)
    is_met = freed >= goal.n_bytes and (
        goal.max_entries is None or sum(e.is_entry for e in left) <= goal.max_entries
    )
    needed = {entry.needs for entry in left}
    assert is_met or all(e.is_fixed or e.key in needed for e in left)
    if goal.pressure is MemoryPressure.CRITICAL:
        assert all(e.is_fixed or e.key in needed for e in left)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=40),
    policy=st.sampled_from(EvictionPolicy),
)
def test_d4_a_soak_never_exceeds_the_budget(
    prompts: list[list[int]], policy: EvictionPolicy
) -> None:
    memory = Memory()
    budget = 60
    for now, tokens in enumerate(prompts):
        found = memory.match(tokens)
        used = [step.key for step in found.path]
        memory.index.touch(used, float(now))
        memory.index.lock(used)
        excess = memory.index.memory_bytes + len(tokens) - found.covered - budget
        evict(memory, EvictionGoal(n_bytes=excess, policy=policy))
        memory.index.unlock(used)
        memory.save(tokens, now=float(now))
        assert memory.index.memory_bytes <= budget
        assert memory.match(tokens).covered == len(tokens) // 4 * 4
