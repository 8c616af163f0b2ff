"""Tokens that end an answer, by the rendering of probes."""

from collections.abc import Iterable, Iterator
from typing import Any

from mlxstack.features.formats.families import FAMILIES
from mlxstack.features.formats.probe_renderings import (
    CONTENT,
    NAMES,
    THOUGHT,
    THOUGHT_FIELDS,
    TWO,
    USER,
    TemplateProbes,
)
from mlxstack.features.formats.syntax import first_mark, is_mark

NEXT_USER = {"role": "user", "content": "Next question."}


def turn_ends(tokenizer: Any, n_ids: int) -> set[int]:
    """Token after an answer, if that has no known end.

    A token that also stands inside of answers, after a thought or before a call, is none.
    """
    probes = TemplateProbes(tokenizer)
    texts = (probes.source, *probes.tokens)
    if any(family.format.channels is not None and family.is_of(texts) for family in FAMILIES):
        return set()
    turns = [USER, {"role": "assistant", "content": CONTENT}, NEXT_USER]
    whole = probes.text(turns, opens=False) or ""
    after = whole.partition(CONTENT)[2].partition(NEXT_USER["content"])[0]
    if any(end in after for end in probes.eos):
        return set()
    ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    mark = first_mark(after)
    # SentencePiece has marks among its pieces.
    vocabulary = tokenizer.get_vocab()
    if is_mark(mark) and mark in vocabulary:
        ids[mark] = vocabulary[mark]
    first = _first_of(after, ids)
    if not first or ids[first] >= n_ids or any(first in text for text in _inside(probes)):
        return set()
    return {ids[first]}


def _first_of(text: str, contents: Iterable[str]) -> str:
    """Longest token that begins a text, after white space."""
    start = text.lstrip()
    begins = [content for content in contents if content.strip() and start.startswith(content)]
    return max(begins, key=len, default="")


def _inside(probes: TemplateProbes) -> Iterator[str]:
    """Texts between thought, content and call of an answer."""
    for field in THOUGHT_FIELDS:
        thinking = probes.turn(CONTENT, (), **{field: THOUGHT}) or ""
        yield thinking.partition(THOUGHT)[2].partition(CONTENT)[0]
    calling = probes.turn(CONTENT, probes.calls(TWO)) or ""
    if NAMES[0] in calling:
        yield calling.partition(CONTENT)[2].partition(NAMES[0])[0]
