"""Token sequences that an answer must not complete."""

from typing import Any

from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint
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
