"""Chains of block keys."""

import hashlib
import struct
import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.prompt_tokens import KeptTokens
from mlxstack.policy.kv.block_hash import checkpoint_key, extend, hash_at, salt, segment_key, start

SALT = salt("a" * 32)


def hash_blocks(salt: bytes, tokens: Sequence[int], size: int) -> tuple[bytes, ...]:
    return extend(start(salt, size), KeptTokens(tokens)).keys


tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def plain_chain(tokens: list[int], size: int) -> tuple[bytes, ...]:
    """The definition, written as it reads."""
    key = hashlib.sha256(SALT).digest()
    keys = []
    for at in range(0, len(tokens) - size + 1, size):
        block = b"".join(struct.pack("<I", t) for t in tokens[at : at + size])
        key = hashlib.sha256(key + block).digest()
        keys.append(key)
    return tuple(keys)


@given(tokens=tokens_lists, size=st.integers(1, 16))
def test_d2_keys_are_the_definition(tokens: list[int], size: int) -> None:
    assert hash_blocks(SALT, tokens, size) == plain_chain(tokens, size)


@given(parts=st.lists(tokens_lists, max_size=5), size=st.integers(1, 16))
def test_z13_extending_equals_starting_over(parts: list[list[int]], size: int) -> None:
    grown = start(SALT, size)
    whole: list[int] = []
    for part in parts:
        whole += part
        grown = extend(grown, KeptTokens(whole))
    assert grown == extend(start(SALT, size), KeptTokens(whole))
    assert grown.n_tokens == len(whole)


@given(tokens=tokens_lists, size=st.integers(1, 16), data=st.data())
def test_state_at_any_position_is_the_state_of_that_prefix(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens)))
    row = KeptTokens(tokens)
    first = KeptTokens(tokens[:position])
    whole = extend(start(SALT, size), row)
    prefix = extend(start(SALT, size), first)
    assert hash_at(whole, row, position) == hash_at(prefix, first, position)
    assert prefix == extend(start(SALT, size), row, position)


@given(a=tokens_lists, b=tokens_lists)
def test_states_are_equal_only_for_equal_tokens(a: list[int], b: list[int]) -> None:
    rows = KeptTokens(a), KeptTokens(b)
    states = {hash_at(extend(start(SALT, 4), row), row, len(row.tokens)) for row in rows}
    assert (len(states) == 1) == (a == b)


def test_d2_a_changed_token_changes_its_block_and_all_after() -> None:
    tokens = list(range(512))
    changed = [*tokens[:130], 9999, *tokens[131:]]
    before = hash_blocks(SALT, tokens, 128)
    after = hash_blocks(SALT, changed, 128)
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after)


def test_d2_the_same_block_elsewhere_has_another_key() -> None:
    twice = hash_blocks(SALT, [7] * 256, 128)
    assert twice[0] != twice[1]


def test_d17_d23_identity_and_tenant_separate() -> None:
    salts = [salt("a" * 32), salt("b" * 32), salt("a" * 32, "tenant")]
    assert len({hash_blocks(s, [1, 2], 2) for s in salts}) == 3


def test_addresses_depend_on_state_start_and_kind() -> None:
    row = KeptTokens([1, 2, 3])
    state = hash_at(extend(start(SALT, 4), row), row, 3)
    names = {segment_key(state, 0), segment_key(state, 1), checkpoint_key(state)}
    assert len(names) == 3
    assert all(len(name) == 64 for name in names)


def test_z13_100k_tokens_take_milliseconds() -> None:
    tokens = tuple(range(100_000))
    best = min(timed(tokens) for _ in range(5))
    assert best < 0.2, f"{best * 1e3:.1f} ms; 10 times the usual, even on a busy machine"


def timed(tokens: tuple[int, ...]) -> float:
    began = time.thread_time()
    hash_blocks(SALT, tokens, 128)
    return time.thread_time() - began
