"""Images in block keys and in comparisons of tokens: by their digests, whatever their ids are."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.image import ImageSize
from mlxstack.core.prompt_tokens import (
    FIRST_VIRTUAL,
    ImageRange,
    ImageSpan,
    KeptTokens,
    PromptTokens,
    check_images,
    kept,
)
from mlxstack.policy.kv.block_hash import extend, hash_at, salt, start
from mlxstack.policy.kv.prefix_index import common_tokens
from mlxstack.text.tokens.cached_tokenizer import common_length

SALT = salt("a" * 32)
SIZE = ImageSize(32, 32, 1, 1)
PARTS = st.lists(st.sampled_from(["1", "12", "A", "B", "C"]), max_size=12)
"""Text of one or two tokens, and images of three tokens whose ids are all the same."""


def row(parts: Sequence[str]) -> KeptTokens:
    """Tokens of the parts; letters are digests."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if part.isdigit():
            tokens += map(int, part)
        else:
            images.append(ImageRange(len(tokens), len(tokens) + 3, part.encode()))
            tokens += [FIRST_VIRTUAL] * 3
    return KeptTokens(tokens, tuple(images))


def letters(parts: Sequence[str]) -> str:
    """The parts as text, three letters for each image."""
    return "".join(part if part.isdigit() else 3 * part for part in parts)


@given(a=PARTS, b=PARTS)
def test_common_tokens_end_where_an_image_differs(a: list[str], b: list[str]) -> None:
    assert common_tokens(row(a), row(b)) == common_length(letters(a), letters(b))


@given(a=PARTS, b=PARTS, size=st.integers(1, 5))
def test_states_are_equal_only_for_equal_images(a: list[str], b: list[str], size: int) -> None:
    rows = row(a), row(b)
    chains = [extend(start(SALT, size), one) for one in rows]
    states = [hash_at(c, one, len(one.tokens)) for c, one in zip(chains, rows, strict=True)]
    assert (states[0] == states[1]) == (letters(a) == letters(b))
    n_blocks = common_length(letters(a), letters(b)) // size
    assert chains[0].keys[:n_blocks] == chains[1].keys[:n_blocks]
    assert not set(chains[0].keys[n_blocks:]) & set(chains[1].keys[n_blocks:])


@given(parts=PARTS, size=st.integers(1, 5), data=st.data())
def test_a_chain_grows_in_any_steps(parts: list[str], size: int, data: st.DataObject) -> None:
    whole = row(parts)
    n_tokens = len(whole.tokens)
    ends = sorted(data.draw(st.lists(st.integers(0, n_tokens), max_size=4)))
    grown = start(SALT, size)
    for end in (*ends, n_tokens):
        grown = extend(grown, kept(whole, 0, end))
        assert grown == extend(start(SALT, size), whole, end)
        assert hash_at(grown, whole, end) == hash_at(extend(start(SALT, size), whole), whole, end)


def spans(images: Sequence[ImageRange]) -> tuple[ImageSpan, ...]:
    return tuple(ImageSpan(one.start, one.end, one.digest, SIZE) for one in images)


@given(parts=PARTS, data=st.data())
def test_a_prompt_cannot_lose_its_images(parts: list[str], data: st.DataObject) -> None:
    whole = row(parts)
    tokens = tuple(whole.tokens)
    images = spans(whole.images)
    prompt = PromptTokens(tokens, images, tuple(range(len(tokens))))
    n = data.draw(st.integers(0, len(tokens)))
    first = prompt.first(n)
    cut = next((one.start for one in images if one.start < n < one.end), n)
    assert first.tokens == tokens[:cut]
    assert first.images == tuple(one for one in images if one.end <= cut)
    assert first.checkpoint_positions == tuple(range(cut))
    assert prompt.extended((7,)).images == images
    if images:
        lost = data.draw(st.sampled_from(images))
        with pytest.raises(ValueError, match="belongs to an image"):
            PromptTokens(tokens, tuple(one for one in images if one is not lost))
        with pytest.raises(ValueError, match="belongs to an image"):
            check_images(tokens, ())
