"""Escapes special tokens in user content so that it cannot inject turns.

A message may contain the letters of a special token, such as the mark that opens a system turn.
Before rendering, an invisible mark is put inside every such spelling; after rendering, only the
template's own special tokens are whole. The tokenizer cuts the text at the marks, removes them,
and encodes both sides on their own: the model reads exactly the letters that were written, as
ordinary tokens, and never the special token. The cut lies where the closing punctuation of the
spelling begins, where most pre-tokenizers cut anyway.

Some tokenizers change letters before they look for special tokens: they take the full-width
"＜ｓ＞" for "<s>". For these a text is looked at as they will see it.

In the words of the assistant the marks of tool calls are left alone, since it wrote them as
single tokens itself, when a call could not be understood.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

# A noncharacter: Unicode reserves it for internal use, so no honest text contains it.
ESCAPE_CHAR = "\ufdd0"
_CLOSING = re.compile(r"[^\w\s]+\Z")


class SpecialTokenEscaper:
    """Escapes the spellings of a template's special tokens in texts.

    `normalize` is what the tokenizer does to a text before it looks for them, if anything.
    """

    def __init__(
        self, structure: Iterable[str], normalize: Callable[[str], str] | None = None
    ) -> None:
        self._normalize = normalize
        longest_first = sorted({s for s in structure if len(s) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def text(self, text: str) -> str:
        """`text` with a mark inside every special token it spells."""
        text = self._break(text.replace(ESCAPE_CHAR, "") if ESCAPE_CHAR in text else text)
        if self._normalize is None:
            return text
        return ESCAPE_CHAR.join(
            self._as_seen(part, self._normalize) for part in text.split(ESCAPE_CHAR)
        )

    def value(self, value: Any) -> Any:
        """A JSON value with all its strings guarded, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def _break(self, text: str) -> str:
        while self._pattern.search(text):
            text = self._pattern.sub(_broken, text)
        return text

    def _as_seen(self, part: str, normalize: Callable[[str], str]) -> str:
        seen = normalize(part)
        if self._pattern.search(seen):
            return self._break(seen)
        return part


def _broken(match: re.Match[str]) -> str:
    spelling = match[0]
    closing = _CLOSING.search(spelling)
    cut = closing.start() if closing and closing.start() > 0 else 1
    return spelling[:cut] + ESCAPE_CHAR + spelling[cut:]


def unescape(text: str) -> str:
    """The text as people wrote it."""
    return text.replace(ESCAPE_CHAR, "")
