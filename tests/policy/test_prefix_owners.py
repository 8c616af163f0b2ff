"""Agents' claims, names, and the list of top prefixes."""

from mlxstack.policy.kv.prefix_index import StorageTier
from mlxstack.policy.kv.prefix_index_check import check_index
from mlxstack.policy.kv.retention import PinnedPrefixName, Retention
from tests.policy.index_memory import Memory

HEAD = [1] * 8


def superseded(memory: Memory) -> set[str]:
    return {key for key, node in memory.index.nodes.items() if node.is_superseded}


def test_a_newer_state_supersedes_what_it_does_not_continue() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    old = memory.save([*HEAD, 2, 2, 2, 2], longest=8)
    owners.claim("coder", old[-1])
    assert superseded(memory) == set()
    new = memory.save([*HEAD, 3, 3, 3, 3], longest=8)
    owners.claim("coder", new[-1])
    assert superseded(memory) == {old[-1]}
    owners.claim("reviewer", old[-1])
    assert superseded(memory) == set()
    assert memory.index.nodes[old[0]].is_shared
    check_index(memory.index, owners)


def test_a_newer_checkpoint_supersedes_the_older_one() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    first = memory.checkpoint(HEAD)
    owners.claim("coder", memory.save(HEAD)[-1], first)
    longer = [*HEAD, 2, 2, 2, 2]
    memory.index.touch([first], 1.0)
    second = memory.checkpoint(longer)
    owners.claim("coder", memory.save(longer)[-1], second)
    assert superseded(memory) == {first}


def test_released_agents_leave_their_states_behind() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save(HEAD)
    owners.claim("coder", path[-1])
    owners.release("coder")
    owners.release("nobody")
    assert superseded(memory) == set(path)
    assert owners.claims == ()


def test_a_path_that_is_left_is_superseded_behind_that_place() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save([*HEAD, 2, 2, 2, 2], longest=8)
    owners.abandon(path, len(HEAD))
    assert superseded(memory) == {path[-1]}
    memory.index.touch(path, 1.0)
    assert superseded(memory) == set(), "it was used after all"


def test_d9_d21_a_pinned_prefix_cannot_go_until_it_is_unpinned() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save(HEAD)
    owners.pin(PinnedPrefixName("system", tuple(path), 8, since=0.0))
    assert not memory.index.can_drop(path[0], StorageTier.MEMORY)
    assert owners.unpin("system")
    assert not owners.unpin("system")
    assert memory.index.can_drop(path[0], StorageTier.MEMORY)


def test_d10_a_learned_name_protects_but_does_not_keep() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save(HEAD)
    owners.pin(PinnedPrefixName("", tuple(path), 8, since=0.0, is_learned=True))
    assert memory.index.nodes[path[0]].is_shared
    memory.index.drop(path[0], StorageTier.MEMORY)
    memory.save(HEAD)
    owners.unpin("")
    check_index(memory.index, owners)


def test_a_name_given_again_moves() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    old = memory.save(HEAD)
    new = memory.save([5] * 8)
    owners.pin(PinnedPrefixName("system", tuple(old), 8, since=0.0))
    owners.pin(PinnedPrefixName("system", tuple(new), 8, since=1.0))
    assert memory.index.can_drop(old[0], StorageTier.MEMORY)
    assert [name.keys for name in owners.names.values()] == [tuple(new)]


def test_d14_top_prefixes_show_names_hits_size_age_and_sharing() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    head = memory.save(HEAD, now=10.0)
    owners.pin(PinnedPrefixName("system", tuple(head), 8, since=10.0))
    one = memory.save([*HEAD, 2, 2, 2, 2], now=20.0)
    two = memory.save([7] * 4, now=30.0)
    for agent in ("a", "b"):
        owners.claim(agent, one[-1])
    memory.index.touch(one, 40.0)
    memory.index.touch(head, 50.0)
    named, longer = owners.top(now=60.0)
    assert (named.name, named.n_tokens, named.n_bytes, named.n_hits) == ("system", 8, 8, 2)
    assert (named.age_s, named.is_pinned) == (50.0, True)
    assert (longer.name, longer.n_tokens, longer.n_bytes, longer.n_hits) == ("", 12, 12, 1)
    assert (named.id, longer.id) == ("system", one[-1])
    for prefix, keys in ((named, head), (longer, one)):
        known = owners.known(prefix.id)
        assert known is not None
        assert (known.keys, known.n_tokens) == (tuple(keys), prefix.n_tokens)
    assert owners.known("nothing") is None
    memory.index.touch(two, 60.0)
    assert len(owners.top(now=60.0)) == 3
    assert len(owners.top(now=60.0, limit=1)) == 1


def test_a_pinned_prefix_without_hits_is_listed_beside_more_used_ones_than_the_limit() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    for word in range(2, 6):
        memory.index.touch(memory.save([word] * 4, now=20.0), 30.0)
    head = memory.save(HEAD, now=40.0)
    owners.pin(PinnedPrefixName("new", tuple(head), 8, since=40.0))
    for limit, hits in ((3, [1, 1, 0]), (1, [0])):
        listed = owners.top(now=60.0, limit=limit)
        assert [prefix.n_hits for prefix in listed] == hits
        assert listed[-1].name == "new"


def test_a_head_is_listed_once_not_for_every_segment_of_its_path() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save([1] * 16, longest=4)
    memory.index.touch(path, 1.0)
    assert [prefix.n_tokens for prefix in owners.top(now=1.0)] == [16]


def test_a_left_state_that_somebody_uses_again_is_an_ordinary_one() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save(HEAD)
    owners.claim("coder", path[-1])
    owners.release("coder")
    memory.index.touch(path, 1.0)
    assert superseded(memory) == set()


def test_what_is_known_of_a_prefix_includes_its_last_checkpoint() -> None:
    memory = Memory()
    owners = Retention(memory.index)
    path = memory.save([*HEAD, 2, 2, 2, 2], longest=8)
    memory.checkpoint(HEAD[:6])
    last = memory.checkpoint(HEAD)
    memory.checkpoint([*HEAD, 2, 2, 2, 2])
    known = owners.known(path[0])
    assert known is not None
    assert known.keys == (path[0], last)
    assert known.n_tokens == 8
    memory.index.touch([path[0], last], 1.0)
    assert [prefix.n_hits for prefix in owners.top(now=1.0)] == [1]
    owners.pin(PinnedPrefixName("system", known.keys, 8, since=0.0))
    assert not memory.index.can_drop(last, StorageTier.MEMORY)


def test_top_lists_segments_not_checkpoints() -> None:
    memory = Memory()
    checkpoint = memory.checkpoint(HEAD)
    memory.index.touch([checkpoint], 1.0)
    assert Retention(memory.index).top(now=1.0) == ()
