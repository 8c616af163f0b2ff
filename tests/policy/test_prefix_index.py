"""The index of the KV memory: paths, locks, places, and its invariants under any history."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxstack.policy.kv import prefix_index
from mlxstack.policy.kv.prefix_index import (
    MAX_FORGOTTEN,
    KnownPrefix,
    PrefixIndex,
    SegmentMeta,
    StorageTier,
    common_prefix,
    end_of,
)
from mlxstack.policy.kv.prefix_index_check import bytes_in, check_index
from mlxstack.policy.kv.retention import PinnedPrefixName, Retention
from tests.policy.index_memory import SIZE, Memory

HEAD = [1] * 10


def test_d2_a_prompt_hits_up_to_its_last_equal_block() -> None:
    memory = Memory(128)
    memory.save([7] * 300)
    assert memory.match([7] * 300).covered == 256
    assert memory.match([7] * 130 + [8] * 170).covered == 128
    assert memory.match([8] * 300).covered == 0


def test_d3_a_shared_head_is_stored_once() -> None:
    memory = Memory()
    memory.save([*HEAD, 2, 2, 2, 2])
    memory.save([*HEAD, 3, 3, 3, 3])
    assert bytes_in(memory.index, StorageTier.MEMORY) == 14 + 6
    check_index(memory.index)


def test_a_child_may_branch_off_inside_its_parent() -> None:
    memory = Memory()
    first = memory.save([*HEAD, 2, 2, 2, 2])
    second = memory.save([*HEAD, 3, 3, 3, 3])
    assert second[0] == first[0]
    steps = memory.match([*HEAD, 3, 3, 3, 3]).path
    assert [(step.start, step.upto) for step in steps] == [(0, 8), (8, 12)]


def test_z9_the_next_turn_writes_only_what_is_new_even_between_blocks() -> None:
    memory = Memory()
    leaf = memory.save(HEAD)[-1]
    chain = memory.chain([*HEAD, 5, 5, 5])
    segment = SegmentMeta("next", leaf, 10, 13, 3, chain.keys[2:3])
    memory.index.insert(segment, StorageTier.MEMORY, 0.0)
    found = memory.match([*HEAD, 5, 5, 5])
    assert found.covered == 12
    assert [(step.start, step.upto) for step in found.path] == [(0, 10), (10, 12)]
    check_index(memory.index)


def test_c3_a_trail_is_good_to_the_token() -> None:
    memory = Memory()
    leaf = memory.save(HEAD)[-1]
    prompt = [*HEAD, 9]
    keys = memory.chain(prompt).keys
    found = prefix_index.match(memory.index, keys, trail=KnownPrefix(leaf, n_common=10))
    assert (memory.match(prompt).covered, found.covered) == (8, 10)
    assert prefix_index.match(memory.index, keys, trail=KnownPrefix("gone", 10)).covered == 8
    assert prefix_index.match(memory.index, keys, trail=KnownPrefix(leaf, 99)).covered == 10
    assert prefix_index.match(memory.index, keys, trail=KnownPrefix(leaf, 3)).covered == 8


def test_a_trail_into_an_older_segment_stops_there() -> None:
    memory = Memory()
    path = memory.save(HEAD, longest=3)
    found = prefix_index.match(memory.index, (), trail=KnownPrefix(path[-1], n_common=5))
    assert found.covered == 5
    assert [step.key for step in found.path] == path[:2]


def test_d20_checkpoints_are_found_on_the_path_and_at_cuts() -> None:
    memory = Memory()
    aligned = memory.checkpoint(HEAD[:4])
    between = memory.checkpoint(HEAD[:6])
    prompt = [*HEAD[:6], 9, 9, 9]
    assert [f.checkpoint for f in memory.match(prompt).checkpoints] == [aligned]
    found = memory.match(prompt, cuts=[6])
    assert found.covered == 6
    assert [(f.checkpoint, f.position) for f in found.checkpoints] == [(aligned, 4), (between, 6)]
    assert memory.match([*HEAD[:5], 9, 9, 9], cuts=[6]).covered == 4


def test_d20_a_checkpoint_behind_the_divergence_is_of_no_use() -> None:
    memory = Memory()
    memory.checkpoint(HEAD)
    found = memory.match([*HEAD[:6], 9, 9, 9, 9])
    assert (found.covered, found.checkpoints) == (4, ())


def test_d20_an_early_cut_does_not_shorten_the_match() -> None:
    memory = Memory()
    memory.checkpoint(HEAD[:3])
    memory.save(HEAD)
    assert memory.match(HEAD, cuts=[3]).covered == 8


def test_d7_locked_records_and_what_carries_them_stay() -> None:
    memory = Memory()
    path = memory.save([*HEAD, 2, 2], longest=4)
    index = memory.index
    assert not index.can_drop(path[0], StorageTier.MEMORY), "it has a child"
    index.lock(path)
    assert not index.can_drop(path[-1], StorageTier.MEMORY)
    index.unlock(path)
    for key in reversed(path):
        index.drop(key, StorageTier.MEMORY)
    assert not index.nodes and not index.blocks and index.memory_bytes == 0
    assert index.n_evicted == 3
    with pytest.raises(AssertionError, match="is not locked"):
        index.unlock(memory.save(HEAD))


def test_places_move_one_by_one_and_the_last_one_takes_the_record_along() -> None:
    memory = Memory()
    key = memory.save(HEAD)[0]
    index = memory.index
    index.set_writing(key, True)
    assert not index.can_drop(key, StorageTier.MEMORY)
    index.set_writing(key, False)
    assert index.insert(index.nodes[key].record, StorageTier.DISK, 1.0)
    assert not index.insert(index.nodes[key].record, StorageTier.DISK, 1.0)
    index.drop(key, StorageTier.MEMORY)
    assert not memory.match(HEAD).path[0].is_parked
    assert [bytes_in(index, tier) for tier in StorageTier] == [0, 10]
    index.drop(key, StorageTier.DISK)
    assert key not in index.nodes


def test_a_parked_twin_is_preferred_to_a_stored_one() -> None:
    memory = Memory()
    leaf = memory.save(HEAD[:6], place=StorageTier.DISK)[-1]
    chain = memory.chain(HEAD[:8])
    memory.index.insert(SegmentMeta("x", leaf, 6, 8, 2, chain.keys[1:2]), StorageTier.DISK, 0.0)
    memory.index.insert(SegmentMeta("y", leaf, 5, 8, 3, chain.keys[1:2]), StorageTier.MEMORY, 0.0)
    assert memory.match(HEAD[:8]).path[-1].key == "y"
    memory.index.drop("y", StorageTier.MEMORY)
    assert memory.match(HEAD[:8]).path[-1].key == "x"


def test_d16_an_evicted_prefix_is_remembered_for_a_while() -> None:
    memory = Memory()
    path = memory.save(HEAD)
    keys = memory.chain(HEAD).keys
    memory.index.drop(path[0], StorageTier.MEMORY)
    assert memory.match(HEAD).covered == 0
    assert prefix_index.was_known(memory.index, keys) == 8
    memory.save(HEAD)
    assert prefix_index.was_known(memory.index, keys) == memory.match(HEAD).covered == 8


def test_d16_the_memory_of_evictions_is_bounded() -> None:
    memory = Memory()
    for token in range(MAX_FORGOTTEN // 2 + 5):
        memory.index.drop(memory.save([token] * 8)[0], StorageTier.MEMORY)
    assert len(memory.index.forgotten) == MAX_FORGOTTEN
    assert prefix_index.was_known(memory.index, memory.chain([0] * 8).keys) == 0
    assert prefix_index.was_known(memory.index, memory.chain([9] * 8).keys) > 0


@pytest.mark.parametrize(
    ("segment", "why"),
    [
        (SegmentMeta("s", None, 4, 8, 4, (b"x",)), "without a parent"),
        (SegmentMeta("s", None, 0, 0, 4), "bad length"),
        (SegmentMeta("s", None, 0, 4096, 4), "bad length"),
        (SegmentMeta("s", None, 0, 4, 4), "names 0 blocks"),
        (SegmentMeta("s", "root", 12, 16, 4, (b"x",)), "leaves a gap"),
        (SegmentMeta("s", "root", 0, 4, 4, (b"x",)), "leaves a gap"),
    ],
)
def test_a_segment_that_does_not_fit_is_refused(segment: SegmentMeta, why: str) -> None:
    index = PrefixIndex(SIZE)
    index.insert(SegmentMeta("root", None, 0, 10, 10, (b"a", b"b")), StorageTier.MEMORY, 0.0)
    with pytest.raises(AssertionError, match=why):
        index.insert(segment, StorageTier.MEMORY, 0.0)
    check_index(index)


def test_check_notices_what_does_not_add_up() -> None:
    memory = Memory()
    path = memory.save([*HEAD, 2], longest=6)
    owners = Retention(memory.index)
    check_index(memory.index, owners)
    memory.index.nodes[path[0]].agents.add("nobody")
    with pytest.raises(AssertionError, match="held by a stranger"):
        check_index(memory.index, owners)
    memory.index.nodes[path[0]].children.clear()
    with pytest.raises(AssertionError, match="unknown to its parent"):
        check_index(memory.index)


class Histories(RuleBasedStateMachine):
    """Any order of saves, evictions, moves, locks and claims keeps matches right."""

    prompts = st.lists(st.integers(0, 1), max_size=24)
    pick = st.integers(0, 10**6)

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.owners = Retention(self.memory.index)
        self.saved: dict[str, list[int]] = {}
        self.locked: list[list[str]] = []
        self.now = 0.0

    @rule(tokens=prompts, longest=st.integers(1, 9), place=st.sampled_from(list(StorageTier)))
    def save(self, tokens: list[int], longest: int, place: StorageTier) -> None:
        self.now += 1.0
        for key in self.memory.save(tokens, self.now, place, longest):
            end = end_of(self.memory.index.nodes[key].record)
            self.saved.setdefault(key, tokens[:end])

    @rule(tokens=prompts.filter(bool))
    def checkpoint(self, tokens: list[int]) -> None:
        self.save(tokens, 2048, StorageTier.MEMORY)
        self.memory.checkpoint(tokens)

    @rule(pick=pick, place=st.sampled_from(list(StorageTier)))
    def drop(self, pick: int, place: StorageTier) -> None:
        index = self.memory.index
        free = [key for key in index.nodes if index.can_drop(key, place)]
        if free:
            index.drop(free[pick % len(free)], place)

    @rule(pick=pick)
    def store(self, pick: int) -> None:
        index = self.memory.index
        if index.nodes:
            node = list(index.nodes.values())[pick % len(index.nodes)]
            index.insert(node.record, StorageTier.DISK, self.now)

    @rule(tokens=prompts)
    def use(self, tokens: list[int]) -> None:
        keys = [step.key for step in self.memory.match(tokens).path]
        self.memory.index.touch(keys, self.now)
        self.memory.index.lock(keys)
        self.locked.append(keys)

    @rule()
    def finish(self) -> None:
        if self.locked:
            self.memory.index.unlock(self.locked.pop())

    @rule(agent=st.sampled_from("ab"), tokens=prompts)
    def claim(self, agent: str, tokens: list[int]) -> None:
        path = self.memory.match(tokens).path
        if path:
            self.owners.claim(agent, path[-1].key)
        else:
            self.owners.release(agent)

    @rule(name=st.sampled_from("xy"), tokens=prompts, is_learned=st.booleans())
    def pin(self, name: str, tokens: list[int], is_learned: bool) -> None:
        found = self.memory.match(tokens)
        keys = tuple(step.key for step in found.path)
        self.owners.pin(PinnedPrefixName(name, keys, found.covered, self.now, is_learned))

    @rule(name=st.sampled_from("xy"))
    def unpin(self, name: str) -> None:
        self.owners.unpin(name)

    @rule(tokens=prompts)
    def a_match_is_the_longest_there_is(self, tokens: list[int]) -> None:
        index = self.memory.index
        known = [t for key, t in self.saved.items() if key in index.nodes]
        longest = max((common_prefix(t, tokens) // SIZE for t in known), default=0)
        found = self.memory.match(tokens)
        assert found.covered == longest * SIZE
        assert [s.start for s in found.path] == [0, *(s.upto for s in found.path[:-1])][
            : len(found.path)
        ]
        for checkpoint in found.checkpoints:
            assert checkpoint.position <= found.covered

    @invariant()
    def everything_adds_up(self) -> None:
        check_index(self.memory.index, self.owners)


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_d7_f5_any_history_keeps_the_invariants = Histories.TestCase
