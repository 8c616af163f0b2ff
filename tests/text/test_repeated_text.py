"""Texts that repeat themselves, and texts that only look so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.repetition import COPIES, LOOK, MIN_CHARS, repeated


@pytest.mark.parametrize("phrase", ["ha ", "0", "the same again, ", "A longer sentence. " * 8])
def test_the_phrase_is_found(phrase: str) -> None:
    text = "It begins well. " + phrase * (MIN_CHARS // len(phrase) + COPIES + 1)
    assert repeated(text) and repeated(text) in phrase * 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "word",
        "-" * 200,
        " ".join(map(str, range(3000))),
        "\n".join(f"| {n} | a row of a table |" for n in range(200)),
        "the same again, " * 9,
    ],
)
def test_ordinary_text_does_not_repeat(text: str) -> None:
    assert repeated(text) == ""


@given(st.text(max_size=2 * LOOK))
def test_a_found_phrase_ends_the_text_many_times(text: str) -> None:
    phrase = repeated(text)
    assert not phrase or text.endswith(phrase * COPIES)
