"""When a prompt is computed by another service: properties of the decision."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.features.remote_kv.policy import (
    CLEARLY,
    MIN_TOKENS,
    STALL_WEIGHT,
    PrefillFacts,
    PrefillPlan,
    PrefillSource,
    choose,
    patience_s,
)

SPEEDS = st.one_of(st.just(0.0), st.floats(1.0, 1e12))
FACTS = st.builds(
    PrefillFacts,
    n_prompt=st.integers(1, 200_000),
    n_here=st.integers(0, 200_000),
    n_there=st.integers(0, 200_000),
    local_s=st.one_of(st.just(0.0), st.floats(1e-3, 1e4)),
    n_decoding=st.integers(0, 8),
    token_bytes=st.integers(1, 1 << 20),
    link_bps=SPEEDS,
    remote_tps=SPEEDS,
    is_remote_idle=st.booleans(),
)
KNOWN = PrefillFacts(
    n_prompt=30_001, n_here=0, n_there=0, local_s=100.0, n_decoding=0, token_bytes=70_000,
    link_bps=1e9, remote_tps=900.0, is_remote_idle=True,
)  # fmt: skip


@given(FACTS)
def test_nothing_is_asked_for_a_few_tokens_or_where_nothing_is_to_be_had(
    facts: PrefillFacts,
) -> None:
    is_short = facts.n_prompt - 1 - facts.n_here < MIN_TOKENS
    is_poor = facts.n_there - facts.n_here < MIN_TOKENS and not facts.is_remote_idle
    if is_short or is_poor:
        assert choose(facts) == PrefillPlan()


@given(FACTS)
def test_a_peer_alone_is_waited_for_by_measured_speeds_only(facts: PrefillFacts) -> None:
    plan = choose(facts)
    if plan.source is PrefillSource.LOCAL or plan.is_race:
        return
    assert facts.link_bps and facts.local_s
    weight = STALL_WEIGHT if facts.n_decoding else 1.0
    assert 0 < plan.expected_s <= CLEARLY * weight * facts.local_s


@given(FACTS)
def test_a_source_has_what_is_taken_from_it(facts: PrefillFacts) -> None:
    plan = choose(facts)
    if plan.source is PrefillSource.FETCH:
        assert facts.n_there - facts.n_here >= MIN_TOKENS
    if plan.source is PrefillSource.REMOTE:
        assert facts.is_remote_idle


@given(FACTS, st.floats(1.0, 100.0))
def test_a_faster_link_or_peer_is_never_left_for_local_prefill(
    facts: PrefillFacts, times: float
) -> None:
    if choose(facts).source is PrefillSource.LOCAL:
        return
    for faster in (
        replace(facts, link_bps=facts.link_bps * times),
        replace(facts, remote_tps=facts.remote_tps * times),
    ):
        assert choose(faster).source is not PrefillSource.LOCAL


@given(FACTS, st.integers(1, 8))
def test_decoding_requests_do_not_bring_a_prompt_back(facts: PrefillFacts, n_more: int) -> None:
    plan = choose(facts)
    if plan.source is not PrefillSource.LOCAL and not plan.is_race:
        busier = choose(replace(facts, n_decoding=facts.n_decoding + n_more))
        assert (busier.source, busier.is_race) == (plan.source, False)


def test_the_plans_of_two_macs_on_ten_gigabit() -> None:
    """30,000 tokens of a 27B: 2.1 GB, 100 s of prefill here."""
    remote = choose(KNOWN)
    assert (remote.source, remote.is_race) == (PrefillSource.REMOTE, False)
    fetch = choose(replace(KNOWN, n_there=30_000))
    assert fetch.source is PrefillSource.FETCH and fetch.expected_s < 3
    as_fast = replace(KNOWN, remote_tps=330.0)
    assert choose(as_fast) == PrefillPlan(
        PrefillSource.REMOTE, is_race=True, expected_s=choose(as_fast).expected_s
    )
    assert not choose(replace(as_fast, n_decoding=3)).is_race
    assert choose(replace(KNOWN, remote_tps=100.0)) == PrefillPlan()
    assert choose(replace(KNOWN, remote_tps=0.0)).is_race
    assert choose(replace(KNOWN, link_bps=1e6)) == PrefillPlan()


@given(FACTS)
def test_patience_ends_and_is_longer_than_what_was_expected(facts: PrefillFacts) -> None:
    plan = choose(facts)
    limit_s = patience_s(plan, facts.local_s)
    assert max(plan.expected_s, facts.local_s) < limit_s < float("inf")
