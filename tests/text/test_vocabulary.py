"""Grammars over the bytes of a vocabulary: forced texts, marks, ids beyond holes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.tokens.special_tokens import nameless
from mlxstack.text.tokens.token_decoder import TokenDecoder
from tests.text.tokenizer_kinds import KINDS, TokenizerKind, kind_of

TEXT = 'x  grüße, está "日本"\n\tthe \U0001f642\U0001f642 é Việt brave\n    return x'
PLAIN = "x the a b"
FREE = r"start: /(.|\n)*/"
COMPLETE = [name for name in KINDS if kind_of(name).is_byte_complete]
OTHERS = ["Metaspace, always", "Metaspace, unigram", "WordPiece", "suffixes", "model of T5"]


def matcher(kind: TokenizerKind, grammar: str) -> LLMatcher:
    rules = GrammarCompiler(kind.tokenizer, kind.n_ids).compile(grammar, "grammar")
    assert rules is not None
    return rules.deep_copy()


def allowed(kind: TokenizerKind, rules: LLMatcher) -> list[int]:
    mask = rules.compute_bitmask()
    return [token for token in range(kind.n_ids) if mask[token // 8] >> token % 8 & 1]


def constant(text: str) -> str:
    """A grammar of one text."""
    return f"start: {quoted(text)}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'


def followed(kind: TokenizerKind, rules: LLMatcher, pick: Any) -> list[int]:
    """Tokens of an answer, each allowed by the grammar."""
    tokens: list[int] = []
    while not rules.is_stopped():
        token = pick(allowed(kind, rules))
        assert rules.consume_token(token), rules.get_error()
        tokens.append(token)
    return [token for token in tokens if token not in kind.tokenizer.eos_token_ids]


@pytest.mark.parametrize("name", COMPLETE)
def test_a_grammar_forces_spaces_accents_and_emojis(name: str) -> None:
    kind = kind_of(name)
    decoder = TokenDecoder(kind.tokenizer)
    rules = matcher(kind, constant(TEXT))
    assert decoder.text(rules.compute_ff_tokens()) == TEXT
    assert decoder.text(followed(kind, rules, lambda choices: choices[0])) == TEXT


@pytest.mark.parametrize("name", OTHERS)
def test_a_grammar_forces_a_text_of_the_vocabulary(name: str) -> None:
    kind = kind_of(name)
    decoder = TokenDecoder(kind.tokenizer)
    tokens = followed(kind, matcher(kind, constant(PLAIN)), lambda choices: choices[0])
    assert b"".join(map(decoder.of, tokens)).decode().strip() == PLAIN


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_choice_of_tokens_follows_the_grammar(name: str, data: st.DataObject) -> None:
    kind = kind_of(name)
    choice = constant("\U0001f642 é") + " | " + quoted("Việt  brave\n")
    tokens = followed(kind, matcher(kind, choice), lambda some: data.draw(st.sampled_from(some)))
    assert TokenDecoder(kind.tokenizer).text(tokens) in ("\U0001f642 é", "Việt  brave\n")


@pytest.mark.parametrize("name", COMPLETE)
def test_free_text_takes_no_mark(name: str) -> None:
    kind = kind_of(name)
    marks = set(nameless(kind.tokenizer).values()) - kind.tokenizer.eos_token_ids
    assert marks
    assert not marks.intersection(allowed(kind, matcher(kind, FREE)))


def test_a_grammar_takes_tokens_beyond_a_hole() -> None:
    kind = kind_of("bytes, sparse ids")
    word = kind.tokenizer.convert_tokens_to_ids(" brave")
    assert word > len(kind.tokenizer)
    assert word in allowed(kind, matcher(kind, FREE))
