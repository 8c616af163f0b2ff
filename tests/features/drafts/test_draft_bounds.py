"""Bounds of a step with drafts: what it may cost the other rows, and a prompt that is computed."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.features.drafts.policy.draft_model_governor import (
    DraftModelRecord,
    DraftPlan,
    plan_drafts,
)
from mlxstack.features.drafts.policy.ngram_draft_governor import (
    DraftOffer,
    StepBounds,
    lead_after,
    step_seconds,
    widths,
)
from mlxstack.policy.pass_layout import PassLayout, WidthCosts
from mlxstack.policy.scheduling.chunked_prefill import (
    DRAFT_SHARE,
    HEADROOM,
    PrefillPolicy,
    ThroughputModel,
    chunk_size,
    draft_bound,
    observe_decode,
    prefill_s,
)
from mlxstack.policy.scheduling.scheduler_state import Slot, SlotState
from tests.features.drafts.test_draft_governor import AT_LOAD

NOISE = 1 + 1e-9
PACE = PrefillPolicy()
BEND = st.floats(0, 1.2)
curves = st.builds(
    lambda first, slope, bend: WidthCosts(
        AT_LOAD, tuple(first * (1 + slope * (w - 1) ** bend) for w in AT_LOAD)
    ),
    st.floats(0.001, 0.4),
    st.floats(0, 1),
    BEND,
)
offers = st.builds(DraftOffer, st.integers(0, 16), st.floats(0, 0.99))
rows = st.lists(st.tuples(offers, st.floats(0, 0.5)), min_size=1, max_size=8)
layouts = st.sampled_from(PassLayout)


@given(rows, curves, layouts, st.booleans())
def test_a_step_with_drafts_stays_within_its_bound_and_delays_no_row_by_more_than_its_lead(
    rows: list[tuple[DraftOffer, float]], costs: WidthCosts, layout: PassLayout, is_prefilling: bool
) -> None:
    offered = [offer for offer, _ in rows]
    leads = tuple(lead_s for _, lead_s in rows)
    plain_s = step_seconds([1] * len(rows), costs, layout)
    most_s = draft_bound(plain_s, len(rows), PACE, is_prefilling=is_prefilling)
    if len(rows) > 1 or is_prefilling:
        assert most_s <= max(PACE.max_stall_s, plain_s)
    brought = widths(offered, costs, layout, StepBounds(most_s, leads))
    taken_s = step_seconds([1 + n for n in brought], costs, layout)
    assert taken_s <= max(plain_s, most_s) * NOISE
    for offer, lead_s, n in zip(offered, leads, brought, strict=True):
        expected = sum(offer.rate**i for i in range(n + 1))
        assert taken_s <= (lead_s + expected * plain_s) * NOISE


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), curves, curves, layouts, st.booleans())
def test_passes_of_a_draft_model_are_within_the_bound_too(
    rates: list[float],
    costs: WidthCosts,
    drafting: WidthCosts,
    layout: PassLayout,
    is_prefilling: bool,
) -> None:
    counts = [1] * len(rates)
    plain_s = step_seconds(counts, costs, layout)
    most_s = draft_bound(plain_s, len(rates), PACE, is_prefilling=is_prefilling)
    record = DraftModelRecord(drafting)
    bounds = StepBounds(most_s, (0.0,) * len(rates))
    planned = plan_drafts(record, dict(enumerate(rates)), DraftPlan(counts, costs, layout, bounds))
    taken_s = step_seconds([1 + planned.get(i, 0) for i in range(len(rates))], costs, layout)
    if planned:
        taken_s += max(planned.values()) * drafting.seconds_at(len(planned))
        assert taken_s <= most_s * NOISE


@given(rows, curves, st.floats(50, 20_000))
def test_beside_drafts_a_prompt_is_computed_as_fast_as_without_but_for_a_share(
    rows: list[tuple[DraftOffer, float]], costs: WidthCosts, tps: float
) -> None:
    """The chunk is as long as without drafts, and step and chunk stay within the stall bound."""
    plain_s = step_seconds([1] * len(rows), costs, PassLayout.RAGGED)
    speed = ThroughputModel(tps, plain_s)
    slot = Slot(9, SlotState.PREFILLING, n_prompt=100_000)
    chunk_s = prefill_s(speed, 0, chunk_size(slot, len(rows), speed, PACE))
    most_s = draft_bound(plain_s, len(rows), PACE, is_prefilling=True)
    bounds = StepBounds(most_s, tuple(lead_s for _, lead_s in rows))
    brought = widths([offer for offer, _ in rows], costs, PassLayout.RAGGED, bounds)
    taken_s = step_seconds([1 + n for n in brought], costs, PassLayout.RAGGED)
    if chunk_s + plain_s <= HEADROOM * PACE.max_stall_s * NOISE:
        assert chunk_s + taken_s <= PACE.max_stall_s
    assert taken_s - plain_s <= DRAFT_SHARE * max(0.0, PACE.max_stall_s - plain_s) * NOISE + 1e-12


def test_a_wide_step_before_an_arrival_makes_its_chunks_no_shorter() -> None:
    """Wide steps were taken for slow ones, and 16 tokens were computed beside each of them."""
    speed = ThroughputModel(2000.0, 0.025)
    slot = Slot(0, SlotState.PREFILLING, n_prompt=2000)
    quick = chunk_size(slot, 3, speed, PACE)
    share = 0.025 / 0.3
    assert chunk_size(slot, 3, observe_decode(speed, share * 0.3), PACE) == quick
    assert chunk_size(slot, 3, replace(speed, decode_s=0.3), PACE) == 16 < quick


def test_a_lead_is_earned_by_accepted_tokens_spent_by_wide_steps_and_never_a_debt() -> None:
    lead_s = lead_after(0.0, 5, 3.0, 1.0)
    assert lead_s == 3.0
    assert lead_after(lead_s, 0, 3.0, 1.0) == 1.0
    assert lead_after(lead_s, 0, 9.0, 1.0) == 0.0
    assert lead_after(lead_s, 0, 1.0, 1.0) == lead_s
    assert lead_after(1e9, 16, 2.0, 1.0) == 32.0
