"""Token sequences that an answer must not complete."""

from collections.abc import Iterable
from typing import Any

from mlxstack.features.formats.grammar.constraint import (
    ConstraintLayout,
    GrammarConstraint,
    GrammarState,
    ThoughtMarks,
)
from mlxstack.features.formats.output_format import OutputFormat


def allowed(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


def test_a_forbidden_call_cannot_open_its_header(harmony: Any) -> None:
    """The header of a call is refused at its first token that no other header has."""

    def tokens(text: str) -> list[int]:
        return list(harmony.encode(text, add_special_tokens=False))

    voice = OutputFormat(harmony)
    layout = ConstraintLayout(
        n_vocab=len(harmony),
        is_in_thinking=True,
        closes=voice.answer_tokens,
        forbidden=voice.call_sequences,
        before=tuple(tokens("<|start|>assistant")),
    )
    walk = GrammarConstraint(layout).start()
    commentary = tokens("<|channel|>commentary")[1]
    start = tokens("<|start|>assistant")
    recipient = tokens("<|start|>assistant to")
    assert recipient[: len(start)] == start
    assert allowed(walk.mask(), commentary)
    said = "<|channel|>final<|message|>commentary to<|end|><|start|>assistant"
    for token in [*recipient[len(start) : -1], *tokens(said), *recipient[len(start) : -1]]:
        assert token == recipient[-1] or allowed(walk.mask(), token)
        walk.advance(token)
    assert not allowed(walk.mask(), recipient[-1])
    for token in tokens("<|message|><|channel|>"):
        walk.advance(token)
    assert not allowed(walk.mask(), commentary)
    assert allowed(walk.mask(), recipient[-1])


def test_a_passage_without_a_forbidden_sequence_allows_every_token() -> None:
    walk = GrammarConstraint(ConstraintLayout(n_vocab=8)).start()
    assert walk.mask() is None
    walk.advance(3)
    assert walk.mask() is None


OPENING = (2, 3)
CLOSING = (4, 5)
BYTES = {2: b"<|ch", 3: b">thought", 4: b"<", 5: b"/ch>", 6: b"/ch>\n\n", 7: b"word"}
"""Tokens of marks that several tokens write; 6 is 5 with what follows it."""


def bounded(budget: int, *, is_in_thinking: bool = False) -> GrammarState:
    """An answer whose thoughts have at most `budget` tokens, at its first token."""
    marks = ThoughtMarks(frozenset(), b"<|ch>thought", b"</ch>", BYTES.__getitem__)
    layout = ConstraintLayout(
        n_vocab=8, closes=CLOSING, budget=budget, thoughts=marks, is_in_thinking=is_in_thinking
    )
    return GrammarConstraint(layout).start()


def follow(walk: GrammarState, tokens: Iterable[int]) -> None:
    for token in tokens:
        assert allowed(walk.mask(), token)
        walk.advance(token)


def n_until_closed(walk: GrammarState) -> int:
    """Tokens of a model that never closes its thought, until its first other token is forced."""
    for n in range(20):
        if not allowed(walk.mask(), 7):
            follow(walk, CLOSING)
            assert walk.mask() is None
            return n
        walk.advance(7)
    raise AssertionError("the thought has no end")


def test_a_mark_of_several_tokens_opens_a_bounded_thought() -> None:
    walk = bounded(3)
    follow(walk, (7, *OPENING))
    assert n_until_closed(walk) == 3


def test_later_thoughts_have_what_earlier_ones_left() -> None:
    walk = bounded(5)
    follow(walk, (*OPENING, 7, *CLOSING, 7, 7, *OPENING))
    assert n_until_closed(walk) == 2
    follow(walk, (7, *OPENING))
    assert n_until_closed(walk) == 0


def test_a_thought_that_closes_itself_in_other_tokens_is_closed() -> None:
    walk = bounded(4, is_in_thinking=True)
    follow(walk, (7, 4, 6, 7, 7, 7, 7, 7, 7))
    assert walk.mask() is None


def test_taking_tokens_back_takes_back_the_mark() -> None:
    walk = bounded(0)
    follow(walk, (7, OPENING[0]))
    position = walk.position()
    follow(walk, OPENING[1:])
    assert n_until_closed(walk) == 0
    walk.rewind(position)
    follow(walk, (7, 7))
    assert walk.mask() is None
    walk.rewind(position)
    follow(walk, OPENING[1:])
    assert not allowed(walk.mask(), 7)
