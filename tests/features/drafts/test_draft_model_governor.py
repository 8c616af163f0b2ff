"""A draft model costs passes before it saves any: never two percent, and a gain where it fits."""

from collections.abc import Callable
from math import inf
from random import Random

import pytest

from mlxstack.features.drafts.policy.draft_model_governor import (
    MAX_CREDIT,
    DraftModelRecord,
    DraftPlan,
    charged,
    plan_drafts,
    prefill_seconds,
    settled,
    step_seconds,
    stepped,
    tokens_within,
    verified,
)
from mlxstack.features.drafts.policy.ngram_draft_governor import pass_widths
from mlxstack.policy.pass_layout import PassLayout, WidthCosts
from tests.features.drafts.test_draft_governor import AT_LOAD, CURVES, Curve
from tests.repetition import all_in_soak

N_STEPS = 1000

Right = Callable[[Random, int], bool]
"""Whether a drafted token at this step is right."""

TEXTS: dict[str, Right] = {
    "wrong": lambda random, at: False,
    "half": lambda random, at: random.random() < 0.5,
    "turning": lambda random, at: at // 60 % 2 == 0,
}

FAR_APART = ("M1 Ultra", "M5 Max", "older path")
"""Curves on which a second token costs the most and the least, and a wide pass the most."""


def simulated(
    curve: Curve,
    right: Right,
    n_rows: int,
    pass_s: float,
    layout: PassLayout,
    seed: int,
    *,
    is_block: bool = False,
    n_steps: int = N_STEPS,
) -> tuple[float, float]:
    """Tokens per second with a draft model whose pass takes `pass_s`, relative to without.

    And its tokens per step and row.
    """
    random = Random(seed)

    def timed(widths: list[int]) -> float:
        return sum(map(curve, widths)) * random.uniform(0.97, 1.03)

    costs = WidthCosts(AT_LOAD, tuple(curve(width) for width in AT_LOAD))
    passes = WidthCosts(AT_LOAD, tuple(pass_s * curve(w) for w in AT_LOAD))
    record = DraftModelRecord(passes)
    if is_block:
        record = DraftModelRecord(passes, start_s=0.0, most=15, is_block=True)
    rates = [record.rate] * n_rows
    counts = [1] * n_rows
    seconds = 0.0
    n_tokens = 0
    plain_s = 0.0
    for at in range(n_steps):
        drafted = plan_drafts(record, dict(enumerate(rates)), DraftPlan(counts, costs, layout))
        brought = [1 + drafted.get(row, 0) for row in range(n_rows)]
        taken = timed(pass_widths(brought, layout))
        spent = record.drafting_s(len(drafted), max(drafted.values())) if drafted else 0.0
        plain = timed(pass_widths(counts, layout))
        seconds += taken + spent
        plain_s += plain
        record = stepped(record, taken, plain)
        n_accepted = 0
        for row, n in drafted.items():
            rights = (*(right(random, at) for _ in range(n)), False)
            rates[row] = verified(rates[row], n, rights.index(False))
            n_accepted += rights.index(False)
        if drafted:
            spent += taken - step_seconds(counts, costs, layout)
            n = sum(drafted.values())
            record = settled(record, n, n_accepted, spent, plain, n_rows)
        n_tokens += n_rows + n_accepted
    return n_tokens / seconds * plain_s / (n_steps * n_rows), n_tokens / (n_steps * n_rows)


@pytest.mark.parametrize(
    ("n_rows", "pass_s", "layout"),
    [(1, 0.05, PassLayout.RAGGED), (1, 1.0, PassLayout.RAGGED), (4, 0.05, PassLayout.ALONE)],
)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("curve", all_in_soak(CURVES, *FAR_APART))
def test_no_draft_model_costs_two_percent(
    curve: str, text: str, n_rows: int, pass_s: float, layout: PassLayout
) -> None:
    gain, _ = simulated(CURVES[curve], TEXTS[text], n_rows, pass_s, layout, seed=1)
    assert gain >= 0.98


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("curve", all_in_soak(CURVES, *FAR_APART))
def test_no_drafter_of_blocks_costs_two_percent(curve: str, text: str) -> None:
    for n_rows, pass_s in ((1, 0.05), (1, 0.5), (4, 0.1)):
        gain, _ = simulated(
            CURVES[curve], TEXTS[text], n_rows, pass_s, PassLayout.RAGGED, seed=3, is_block=True
        )
        assert gain >= 0.98


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("n_rows", [1, 2, 4])
def test_a_useless_drafter_shows_within_one_short_answer(curve: str, n_rows: int) -> None:
    gain, _ = simulated(
        CURVES[curve],
        TEXTS["wrong"],
        n_rows,
        0.1,
        PassLayout.RAGGED,
        seed=4,
        is_block=True,
        n_steps=130,
    )
    assert gain >= 0.975


@pytest.mark.parametrize("curve", ["M3 Ultra", "M4 Pro", "M5 Max"])
def test_a_draft_model_that_fits_gains(curve: str) -> None:
    right: Right = lambda random, at: random.random() < 0.8  # noqa: E731
    gain, per_step = simulated(CURVES[curve], right, 1, 0.05, PassLayout.RAGGED, seed=2)
    assert gain >= 1.3
    assert per_step >= 2
    assert simulated(CURVES[curve], right, 4, 0.05, PassLayout.RAGGED, seed=2)[0] >= 0.98


def test_a_costly_pass_is_worth_fewer_tokens() -> None:
    costs = WidthCosts((1, 32), (1.0, 2.0))
    cheap, dear = (DraftModelRecord(WidthCosts((1,), (s,))) for s in (0.01, 0.2))
    planned = [plan_drafts(one, {0: 0.8}, DraftPlan([1], costs))[0] for one in (cheap, dear)]
    assert planned[0] > planned[1] > 0


def test_a_block_costs_one_pass_whatever_its_length() -> None:
    costs = WidthCosts((1, 32), (1.0, 2.0))
    passes = WidthCosts((1, 32), (0.1, 0.11))
    steps = DraftModelRecord(passes)
    block = DraftModelRecord(passes, is_block=True, most=15)
    assert block.drafting_s(1, 15) < steps.drafting_s(1, 2)
    planned = [plan_drafts(one, {0: 0.9}, DraftPlan([1], costs))[0] for one in (steps, block)]
    assert planned[0] < planned[1] <= 15
    short = DraftModelRecord(passes, is_block=True, most=1)
    for rate in (0.05, 0.9):
        assert plan_drafts(short, {0: rate}, DraftPlan([1], costs)) == {0: 1}


def test_a_block_holds_the_known_token_of_each_row() -> None:
    """It counts as a pass of that many tokens: wide ones are dear here."""
    costs = WidthCosts((1, 32), (1.0, 1.5))
    passes = WidthCosts((1, 4, 8), (0.1, 0.1, 9.0))
    record = DraftModelRecord(passes, is_block=True, most=15)
    assert plan_drafts(record, {0: 0.9}, DraftPlan([1], costs)) == {0: 3}


def test_the_likelier_rows_are_drafted_for() -> None:
    costs = WidthCosts((1, 4, 8), (1.0, 1.1, 9.0))
    record = DraftModelRecord(WidthCosts((1,), (0.01,)))
    planned = plan_drafts(record, {0: 0.1, 2: 0.9}, DraftPlan([1, 1, 1], costs))
    assert list(planned) == [2]


def test_without_credit_nothing_is_tried_until_steps_have_earned_it() -> None:
    costs = WidthCosts((1, 32), (1.0, 2.0))
    record = charged(DraftModelRecord(WidthCosts((1,), (0.1,)), credit=0.05), 0.1)
    assert plan_drafts(record, {0: 0.9}, DraftPlan([1], costs)) == {}
    n_steps = 0
    while not plan_drafts(record, {0: 0.1}, DraftPlan([1], costs)):
        record = stepped(record, 1.0, 1.0)
        n_steps = n_steps + 1
    assert 50 < n_steps < 75


def test_a_prefill_is_worth_what_proven_drafts_save() -> None:
    costs = WidthCosts((1, 32), (1.0, 2.0))
    new = DraftModelRecord(WidthCosts((1, 2), (0.05, 0.1)), rate=0.8, credit=0.5)
    proven = settled(settled(new, 60, 60, 60.0, 1.0), 1, 0, 0.1, 1.0)
    assert prefill_seconds(new, 10, 1000, costs) == pytest.approx(0.5)
    assert prefill_seconds(proven, 1000, 1000, costs) == inf
    for n_behind, n_left in ((1000, 20), (9000, 1000)):
        assert prefill_seconds(proven, n_behind, n_left, costs) < 1
    wrong = proven
    for _ in range(200):
        wrong = settled(wrong, 1, 0, 0.1, 1.0)
    assert prefill_seconds(wrong, 10, 1000, costs) == 0


def test_what_drafts_saved_may_be_lost_again_but_not_all_of_it() -> None:
    record = DraftModelRecord(WidthCosts((1,), (0.1,)), credit=0.0)
    for _ in range(100):
        record = settled(record, 4, 4, 0.5, 1.0)
    assert record.credit == MAX_CREDIT
    assert stepped(record, 1.0, 1.0).credit == MAX_CREDIT


def test_a_prefill_chunk_stays_within_its_seconds() -> None:
    costs = WidthCosts((1, 32), (0.01, 0.02))
    n_tokens = tokens_within(costs, 0.1, 512)
    assert costs.seconds_at(n_tokens) <= 0.1 < costs.seconds_at(2 * n_tokens)
    assert tokens_within(costs, 0.0, 512) == 16
    assert tokens_within(costs, 9.0, 512) == 512
