"""Parking: a longer context is never worth less, and nothing is stored that cannot be rebuilt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.preset import DiskSpec, Persist, PrefixCacheSpec
from mlxstack.policy.kv.parking import MIN_PARKED, ContextFacts, is_stored, is_worth_parking

BLOCK = 128
ON_DISK = PrefixCacheSpec(block_size=BLOCK)
CONTEXTS = st.builds(
    ContextFacts,
    n_tokens=st.integers(0, 4 * BLOCK),
    has_agent=st.booleans(),
    is_sliceable=st.booleans(),
    is_storable=st.booleans(),
)


@given(CONTEXTS, st.integers(0, 3 * BLOCK), st.integers(1, BLOCK))
def test_more_tokens_are_never_worth_less(context: ContextFacts, n_kept: int, more: int) -> None:
    longer = replace(context, n_tokens=context.n_tokens + more)
    if is_worth_parking(context, n_kept, BLOCK):
        assert is_worth_parking(longer, n_kept, BLOCK)
    if is_stored(context, ON_DISK, Persist.ON_PARK):
        assert is_stored(longer, ON_DISK, Persist.ON_PARK)


@given(CONTEXTS, st.integers(0, 3 * BLOCK))
def test_what_stays_in_the_slot_is_not_parked_again(context: ContextFacts, n_kept: int) -> None:
    if context.n_tokens - n_kept >= BLOCK:
        assert is_worth_parking(context, n_kept, BLOCK)
    elif n_kept:
        assert not is_worth_parking(context, n_kept, BLOCK)


@given(CONTEXTS, st.sampled_from(Persist), st.booleans(), st.booleans())
def test_nothing_is_stored_that_cannot_be_rebuilt_or_has_no_place(
    context: ContextFacts, persist: Persist, is_enabled: bool, has_disk: bool
) -> None:
    spec = replace(ON_DISK, enabled=is_enabled, disk=DiskSpec(enabled=has_disk))
    if is_stored(context, spec, persist):
        assert context.is_storable and is_enabled and has_disk and context.n_tokens
        assert not (context.has_agent and persist is Persist.NEVER)


@given(CONTEXTS, st.sampled_from([Persist.ON_PARK, Persist.AFTER_TURN]))
def test_an_agent_is_parked_and_stored_whenever_another_context_is(
    context: ContextFacts, persist: Persist
) -> None:
    named = replace(context, has_agent=True)
    assert is_worth_parking(named, 0, BLOCK) >= is_worth_parking(context, 0, BLOCK)
    assert is_stored(named, ON_DISK, persist) >= is_stored(context, ON_DISK, persist)


@pytest.mark.parametrize(
    ("n_tokens", "has_agent", "is_sliceable", "expected"),
    [
        (BLOCK, False, False, True),
        (BLOCK - 1, False, True, True),
        (BLOCK - 1, False, False, False),
        (MIN_PARKED - 1, False, True, False),
        (1, True, False, True),
        (0, True, True, False),
    ],
)
def test_a_short_context_is_parked_if_it_is_an_agents_or_can_be_cut(
    n_tokens: int, has_agent: bool, is_sliceable: bool, expected: bool
) -> None:
    context = ContextFacts(n_tokens, has_agent, is_sliceable, is_storable=True)
    assert is_worth_parking(context, 0, BLOCK) is expected
