"""Special tokens of a tokenizer: structural ones, and safe split points."""

from collections.abc import Callable
from typing import Any, cast

from msgspec import Struct

from mlxstack.core.interfaces import AnswerFormat


class SpecialTokens(Struct, frozen=True):
    """Special tokens of a tokenizer, by their texts."""

    structure: frozenset[str]
    """Those that make turns and markers; no message may spell them."""
    calls: frozenset[str]
    """Those of `structure` that open and close a tool call."""
    anchors: frozenset[str]
    """Those at which a text can be cut without changing its tokens."""
    rivals: frozenset[str]
    """Added tokens that could swallow the beginning of an anchor."""
    normalize: Callable[[str], str] | None = None
    """Normalization of a text before special tokens are searched in it, if any."""


def special_tokens_of(tokenizer: Any, answer_format: AnswerFormat) -> SpecialTokens:
    """Special tokens of a mlx-lm TokenizerWrapper."""
    added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
    template = str(getattr(tokenizer, "chat_template", None) or "")
    structure = {t.content for t in added if _is_structure(t, answer_format.marks, template)}
    anchors = {t.content for t in added if t.content in structure and _is_anchor(t)}
    plain = {t.content for t in added} - anchors
    return SpecialTokens(
        structure=frozenset(structure),
        calls=frozenset(answer_format.marks_of_calls),
        anchors=frozenset(anchors),
        rivals=frozenset(t for t in plain if _is_rival(t, anchors)),
        normalize=_normalize(tokenizer, [t for t in added if t.content in structure]),
    )


def nameless(tokenizer: Any) -> dict[str, int]:
    """Tokens that no grammar text spells, by content, for llguidance."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _normalize(tokenizer: Any, structure: list[Any]) -> Callable[[str], str] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    if normalizer is None or not any(token.normalized for token in structure):
        return None
    return cast("Callable[[str], str]", normalizer.normalize_str)


def _is_structure(token: Any, markers: tuple[str, ...], template: str) -> bool:
    """Whether a token is special, the template's, or part of markers."""
    text: str = token.content
    if text.isspace() or len(text) < 2:
        return False
    return bool(token.special) or text in template or any(text in marker for marker in markers)


def _is_anchor(token: Any) -> bool:
    return not (token.normalized or token.lstrip or token.single_word)


def _is_rival(token: str, anchors: set[str]) -> bool:
    return any(token.startswith(a) or a[0] in token[1:] for a in anchors)
