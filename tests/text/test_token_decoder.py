"""The streamed text is that of all tokens decoded at once, for every kind of tokenizer."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlxstack.text.tokens.token_decoder import TokenDecoder
from tests.environment import option
from tests.real.folders import ROOT as REAL
from tests.text.tokenizer_kinds import (
    KINDS,
    SPM_STRIPPED,
    WORDS,
    TokenizerKind,
    added,
    byte_level,
    fast,
    kind_of,
    metaspace,
    python_model,
    spm,
)

FOLDER = option("TOKENIZERS") or ""
"""A folder in which published tokenizer.json files lie, at any depth."""
FOLDERS = [Path(FOLDER), REAL] if FOLDER else [REAL]
PUBLISHED = [file for folder in FOLDERS for file in sorted(folder.rglob("tokenizer.json"))]
many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=12).map("".join)
rows = st.lists(st.integers(0, 10**6), max_size=24)


def streamed(decoder: TokenDecoder, tokens: list[int], n_before: int = 0) -> str:
    stream = decoder.stream(tokens[:n_before])
    return "".join([stream.push(token) for token in tokens[n_before:]]) + stream.finish()


def row_of(kind: TokenizerKind, numbers: list[int], text: str) -> list[int]:
    """Random tokens, unknown ones among them, and those of a text."""
    tokens = [number % (kind.n_ids + 2) for number in numbers]
    return [*tokens, *kind.tokenizer.encode(text, add_special_tokens=False), *tokens[:3]]


def check_row(kind: TokenizerKind, tokens: list[int], n_before: int) -> None:
    decoder = TokenDecoder(kind.tokenizer)
    whole = kind.reference(tokens)
    assert streamed(decoder, tokens) == decoder.text(tokens) == whole
    head = kind.reference(tokens[:n_before])
    if whole.startswith(head):
        assert streamed(decoder, tokens, n_before) == whole[len(head) :]


@pytest.mark.parametrize("name", KINDS)
@many
@given(rows, texts, st.integers(0, 30))
def test_streamed_text_is_the_text_of_all_tokens(
    name: str, numbers: list[int], text: str, n_before: int
) -> None:
    kind = kind_of(name)
    check_row(kind, row_of(kind, numbers, text), n_before)


@pytest.mark.parametrize("name", [name for name in KINDS if kind_of(name).is_byte_complete])
@many
@given(texts)
def test_bytes_of_the_tokens_are_the_text(name: str, text: str) -> None:
    kind = kind_of(name)
    decoder = TokenDecoder(kind.tokenizer)
    # SentencePiece's letter of a space cannot be written; a space before a text comes and goes.
    text = text.replace("\u2581", "")
    tokens = kind.tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(decoder.of, tokens)).decode()
    assert joined.lstrip(" ") == kind.reference(tokens).lstrip(" ") == text.lstrip(" ")


@cache
def published(file: Path) -> TokenizerKind:
    return fast(Tokenizer.from_file(str(file)))


@pytest.mark.skipif(not PUBLISHED, reason="no published tokenizer is here")
@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: "/".join(file.parts[-4:-1]))
@many
@given(rows, texts, st.integers(0, 30))
def test_streamed_text_of_published_tokenizers(
    file: Path, numbers: list[int], text: str, n_before: int
) -> None:
    kind = published(file)
    check_row(kind, row_of(kind, numbers, text), n_before)


@many
@given(st.lists(texts, max_size=20), st.integers(0, 10))
def test_a_tokenizer_in_python_is_read_in_windows(parts: list[str], n_before: int) -> None:
    kind = _python()
    tokens = kind.tokenizer.encode("x" + "".join(parts), add_special_tokens=False)
    assert streamed(TokenDecoder(kind.tokenizer), tokens) == kind.reference(tokens)


@cache
def _python() -> TokenizerKind:
    return python_model()


def test_an_added_word_is_its_letters_where_they_are_no_bytes() -> None:
    """The library reads the letter á of an added word as the byte E1."""
    kind = fast(byte_level(None, added("está", "é", "ñandú")))
    decoder = TokenDecoder(kind.tokenizer)
    tokens = kind.tokenizer.encode("x está é ñandú", add_special_tokens=False)
    assert "\ufffd" in kind.reference(tokens)
    assert streamed(decoder, tokens) == "x está é ñandú"
    assert b"".join(map(decoder.of, tokens)) == "x está é ñandú".encode()


def test_without_a_decoder_letters_of_spaces_are_spaces() -> None:
    right = metaspace("always")
    data = json.loads(right.to_str())
    kind = fast(Tokenizer.from_str(json.dumps({**data, "decoder": None})))
    tokens = kind.tokenizer.encode("def x\n    return", add_special_tokens=False)
    text = right.decode(tokens, skip_special_tokens=False)
    assert streamed(TokenDecoder(kind.tokenizer), tokens) == text
    assert "\u2581" not in text


def test_every_token_is_shown_at_once_but_for_bytes() -> None:
    kind = kind_of("pieces")
    stream = TokenDecoder(kind.tokenizer).stream()
    tokens = kind.tokenizer.encode("x the x\n\nthe\U0001f600\U0001f600 x", add_special_tokens=False)
    shown = [stream.push(token) for token in tokens]
    assert "".join(shown) + stream.finish() == "x the x\n\nthe\U0001f600\U0001f600 x"
    assert shown.count("") == 8, "the bytes of two emojis are shown with the token after them"


def test_a_row_of_bytes_that_is_cut_short_is_unknown() -> None:
    kind = fast(spm(SPM_STRIPPED))
    tokens = kind.tokenizer.encode("x日語", add_special_tokens=False)[:-1]
    assert streamed(TokenDecoder(kind.tokenizer), tokens) == kind.reference(tokens)
    assert kind.reference(tokens).endswith("\ufffd")
