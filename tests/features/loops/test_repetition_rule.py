"""The rule against repetition, on token ids."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstack.features.loops.policy import (
    MAX_SHORT,
    Repetition,
    RepetitionRule,
    TokenText,
    max_covered,
)

PROBE = 8
MAX_PERIOD = 64


def covered(tokens: list[int], period: int) -> int:
    """Tokens at the end that a repetition of this period covers."""
    pairs = zip(reversed(tokens), reversed(tokens[:-period]), strict=False)
    return period + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def observed(tokens: list[int], rule: RepetitionRule) -> list[Repetition | None]:
    return [rule.observe(token) for token in tokens]


def first_stop(tokens: list[int]) -> int | None:
    """Number of tokens at which the rule ends a text."""
    rule = RepetitionRule()
    for n, token in enumerate(tokens, start=1):
        repetition = rule.observe(token)
        if repetition is not None and repetition.is_too_long:
            return n
    return None


texts = st.lists(st.integers(0, 2), max_size=40).flatmap(
    lambda block: st.tuples(
        st.lists(st.integers(0, 2), max_size=30),
        st.just(block),
        st.integers(0, 6),
        st.lists(st.integers(0, 2), max_size=30),
    )
)


@given(texts)
@settings(max_examples=300)
def test_a_repetition_is_as_long_as_it_is_said_to_be(
    parts: tuple[list[int], list[int], int, list[int]],
) -> None:
    before, block, n_copies, after = parts
    tokens = [*before, *block * n_copies, *after]
    for n, repetition in enumerate(observed(tokens, RepetitionRule(PROBE, MAX_PERIOD)), start=1):
        if repetition is not None:
            exact = covered(tokens[:n], repetition.period)
            # The copies before the first look are not all counted.
            assert min(exact, 4 * max(repetition.period, PROBE)) <= repetition.n_tokens <= exact


@given(texts)
@settings(max_examples=300)
def test_a_short_period_is_never_missed(parts: tuple[list[int], list[int], int, list[int]]) -> None:
    before, block, n_copies, after = parts
    tokens = [*before, *block * n_copies, *after]
    for n, repetition in enumerate(observed(tokens, RepetitionRule(PROBE, MAX_PERIOD)), start=1):
        for period in range(1, PROBE + 1):
            if covered(tokens[:n], period) >= period + PROBE:
                assert repetition is not None
                assert repetition.period <= period
                break


@given(st.integers(1, 1500), st.integers(0, 700), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_period_ends_within_the_promise(period: int, n_before: int, random: object) -> None:
    block = [random.randrange(5000) for _ in range(period)]  # type: ignore[attr-defined]
    before = [random.randrange(5000) for _ in range(n_before)]  # type: ignore[attr-defined]
    stop = first_stop([*before, *(block * (600 // period + 4))])
    assert stop is not None
    # The last token before the first copy may happen to continue it.
    assert stop - n_before <= max_covered(period)
    assert stop - n_before < max(MAX_SHORT + 1, 3 * period)


def test_text_that_comes_twice_goes_on() -> None:
    licence = list(range(1500))
    assert first_stop([*licence, *licence, *range(9000, 9100)]) is None


def test_a_run_below_the_bound_goes_on() -> None:
    zeros = [7] * (MAX_SHORT - 1)
    assert first_stop([1, *zeros, 2, *zeros, 3]) is None


def test_a_rule_that_is_restarted_forgets() -> None:
    rule = RepetitionRule()
    observed([7] * 500, rule)
    rule.restart()
    repetitions = observed([7] * MAX_SHORT, rule)
    assert repetitions[-1] == Repetition(1, MAX_SHORT)
    assert not any(repetition.is_too_long for repetition in repetitions[:-1] if repetition)


def test_old_probes_are_forgotten() -> None:
    rule = RepetitionRule(PROBE, MAX_PERIOD)
    observed(list(range(10_000)), rule)
    assert len(rule._positions) + len(rule._older) <= 2 * (MAX_PERIOD + 1)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=4))
def test_a_part_of_a_text_is_recognized(text: list[int], run: list[int]) -> None:
    parts = [text[i : i + len(run)] for i in range(len(text) + 1)]
    searched = TokenText([256 * token for token in text])
    for _ in range(2):
        assert searched.has([256 * token for token in run]) == (run in parts)
