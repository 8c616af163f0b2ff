"""The n-gram index continues as the longest match among the latest places went on."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.features.drafts.engine.ngram_index import MAX_MATCH, N_CANDIDATES, ORDER, NgramIndex

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def match(tokens: list[int], place: int) -> int:
    n = 0
    while n < min(place, MAX_MATCH) and tokens[place - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


@given(TOKENS, TOKENS)
def test_a_continuation_followed_an_equal_ngram(prompt: list[int], answer: list[int]) -> None:
    index = NgramIndex(prompt)
    for n in range(len(answer) + 1):
        known = prompt + answer[:n]
        places = [p for p in range(ORDER, len(known)) if known[p - ORDER : p] == known[-ORDER:]]
        found = index.continuation(1)
        assert bool(found) == bool(places and len(known) > ORDER)
        if found:
            assert found[0] in {known[p] for p in places}
        if n < len(answer):
            index.append(answer[n])


@given(TOKENS)
def test_at_first_the_longest_of_the_latest_matches_is_taken(prompt: list[int]) -> None:
    places = [p for p in range(ORDER, len(prompt)) if prompt[p - ORDER : p] == prompt[-ORDER:]]
    latest = places[-N_CANDIDATES:]
    best = max(latest, key=lambda p: (match(prompt, p), p), default=None)
    span = [] if best is None else prompt[best : best + 5]
    assert NgramIndex(prompt).continuation(5)[: len(span)] == span


def test_a_copied_span_is_followed_to_its_end_and_a_loop_goes_on() -> None:
    text = list(range(100, 140))
    index = NgramIndex([*text, 7, 8, *text[:4]])
    for at in range(4, 30):
        assert index.continuation(6) == text[at : at + 6]
        index.append(text[at])
    loop = NgramIndex([1, 2, 3, 4, 1, 2, 3, 4])
    assert loop.continuation(10) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_ids_of_the_largest_vocabularies_do_not_collide() -> None:
    largest = (1 << 21) - 1
    index = NgramIndex([largest, largest, largest, 5, 0, 0, 0, 6, largest, largest, largest])
    assert index.continuation(1) == [5]
    assert NgramIndex([1, 2]).continuation(4) == []


def test_a_prediction_leads_from_the_end_of_the_prompt_and_is_found_again() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 4]
    predicted = list(range(20, 40))
    index = NgramIndex(tokens, predicted)
    assert index.continuation(3) == predicted[:3]
    for token in (*predicted[:5], 99, *predicted[6:9]):
        index.append(token)
    assert index.continuation(4) == predicted[9:13]
    assert NgramIndex(tokens).continuation(1) == [9]
    for token in predicted[9:]:
        index.append(token)
    assert index.continuation(2) == []
