"""Heads learned from traffic."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.kv import shared_prefixes
from mlxstack.policy.kv.shared_prefixes import SharedPrefix, SharedPrefixDetector

HEAD = [b"system", b"tools"]


def test_d10_three_conversations_make_a_head_hot_once() -> None:
    heads = SharedPrefixDetector(need=3)
    assert heads.observe("a", [*HEAD, b"a1"]) is None
    assert heads.observe("b", [*HEAD, b"b1"]) is None
    assert heads.observe("c", [*HEAD, b"c1"]) == SharedPrefix(b"tools", 2)
    assert heads.observe("d", [*HEAD, b"d1"]) is None
    assert heads.hot == (SharedPrefix(b"tools", 2),)


def test_d10_turns_of_one_conversation_do_not_count() -> None:
    heads = SharedPrefixDetector(need=3)
    for turn in range(10):
        assert heads.observe("a", [*HEAD, *(b"%d" % i for i in range(turn))]) is None


def test_d10_a_longer_shared_head_becomes_hot_too() -> None:
    heads = SharedPrefixDetector(need=2)
    heads.observe("a", [b"1", b"2", b"3"])
    assert heads.observe("b", [b"1", b"9"]) == SharedPrefix(b"1", 1)
    assert heads.observe("c", [b"1", b"2", b"3", b"4"]) == SharedPrefix(b"3", 3)


def test_d10_short_heads_and_empty_prompts_are_not_worth_it() -> None:
    heads = SharedPrefixDetector(need=1, min_blocks=2)
    assert heads.observe("a", [b"1"]) is None
    assert heads.observe("a", []) is None
    assert heads.observe("a", [b"1", b"2"]) == SharedPrefix(b"2", 2)


def test_d10_heads_survive_a_restart_and_can_be_forgotten() -> None:
    heads = SharedPrefixDetector(need=1, known=[SharedPrefix(b"tools", 2)])
    assert heads.observe("a", HEAD) is None
    heads.forget(b"tools")
    heads.forget(b"never seen")
    assert heads.observe("b", HEAD) == SharedPrefix(b"tools", 2)


def test_d10_memory_is_bounded() -> None:
    heads = SharedPrefixDetector(need=2)
    for i in range(shared_prefixes.MAX_KEYS + 10):
        heads.observe("a", [b"%d" % i])
    assert heads.observe("b", [b"0"]) is None, "the oldest block was forgotten"
    assert heads.observe("b", [b"%d" % (shared_prefixes.MAX_KEYS + 9)]) is not None


prompts = st.lists(
    st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 1), max_size=5)), max_size=30
)


@given(prompts=prompts, need=st.integers(1, 4))
def test_d10_hot_means_enough_different_conversations(
    prompts: list[tuple[str, list[int]]], need: int
) -> None:
    heads, who = SharedPrefixDetector(need=need), dict[bytes, set[str]]()
    for conversation, path in prompts:
        keys = [bytes(path[: i + 1]) for i in range(len(path))]
        for key in keys:
            who.setdefault(key, set()).add(conversation)
        found = heads.observe(conversation, keys)
        shared = [key for key in keys if len(who[key]) >= need]
        if found is not None:
            assert found.key == shared[-1]
        if shared:
            assert shared[-1] in {head.key for head in heads.hot}
