"""Heads learned from traffic."""

from collections.abc import Sequence
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.policy.kv import shared_prefixes
from mlxstack.policy.kv.block_hash import BlockHashes
from mlxstack.policy.kv.shared_prefixes import SharedPrefix, SharedPrefixes, SharedPrefixTokens

HEAD = [b"system", b"tools"]


def seen(prefixes: SharedPrefixes, conversation: str, keys: Sequence[bytes]) -> SharedPrefix | None:
    """The prefix that a prompt of these blocks, one token each, makes shared."""
    request = Request(id="", prompt=PromptTokens(tuple(range(len(keys)))), max_tokens=1)
    return prefixes.observe(conversation, BlockHashes(1, b"", tuple(keys)), request)


def test_d10_three_conversations_make_a_head_hot_once() -> None:
    prefixes = SharedPrefixes(1)
    assert seen(prefixes, "a", [*HEAD, b"a1"]) is None
    assert seen(prefixes, "b", [*HEAD, b"b1"]) is None
    assert seen(prefixes, "c", [*HEAD, b"c1"]) == SharedPrefix(b"tools", 2)
    assert seen(prefixes, "d", [*HEAD, b"d1"]) is None
    assert [*prefixes.named.values()] == [SharedPrefix(b"tools", 2)]
    assert prefixes.learned == (SharedPrefixTokens(b"tools".hex(), (0, 1)),)


def test_d10_turns_of_one_conversation_do_not_count() -> None:
    prefixes = SharedPrefixes(1)
    for turn in range(10):
        assert seen(prefixes, "a", [*HEAD, *(b"%d" % i for i in range(turn))]) is None


def test_d10_a_longer_shared_head_becomes_hot_too() -> None:
    prefixes = SharedPrefixes(1, need=2)
    seen(prefixes, "a", [b"1", b"2", b"3"])
    assert seen(prefixes, "b", [b"1", b"9"]) == SharedPrefix(b"1", 1)
    assert seen(prefixes, "c", [b"1", b"2", b"3", b"4"]) == SharedPrefix(b"3", 3)


def test_d10_empty_prompts_have_no_head() -> None:
    assert seen(SharedPrefixes(1, need=1), "a", []) is None


def test_d10_heads_survive_a_restart_and_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = SharedPrefixes(1, need=1)
    prefixes.recall(msgspec.json.encode([SharedPrefixTokens(b"tools".hex(), (0, 1))]))
    assert seen(prefixes, "a", HEAD) is None
    monkeypatch.setattr(shared_prefixes, "MAX_HEADS", 1)
    assert seen(prefixes, "a", [b"other"]) == SharedPrefix(b"other", 1)
    assert seen(prefixes, "b", HEAD) == SharedPrefix(b"tools", 2)
    prefixes.recall(b"no note")
    assert [*prefixes.named.values()] == [SharedPrefix(b"tools", 2)]


def test_d10_memory_is_bounded() -> None:
    prefixes = SharedPrefixes(1, need=2)
    for i in range(shared_prefixes.MAX_KEYS + 10):
        seen(prefixes, "a", [b"%d" % i])
    assert seen(prefixes, "b", [b"0"]) is None, "the oldest block was forgotten"
    assert seen(prefixes, "b", [b"%d" % (shared_prefixes.MAX_KEYS + 9)]) is not None


prompts = st.lists(
    st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 1), max_size=5)), max_size=30
)


@given(prompts=prompts, need=st.integers(1, 4))
def test_d10_hot_means_enough_different_conversations(
    prompts: list[tuple[str, list[int]]], need: int
) -> None:
    prefixes = SharedPrefixes(1, need=need)
    who = dict[bytes, set[str]]()
    for conversation, path in prompts:
        keys = [sha256(bytes(path[: i + 1])).digest() for i in range(len(path))]
        for key in keys:
            who.setdefault(key, set()).add(conversation)
        found = seen(prefixes, conversation, keys)
        shared = [key for key in keys if len(who[key]) >= need]
        if found is not None:
            assert found.key == shared[-1]
        if shared:
            assert shared[-1] in {head.key for head in prefixes.named.values()}
