"""Text of a rendered prompt that stands for other tokens.

Each kind of it is a `PromptSplicer`, which the assembly hands to the prompt maker.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.response_parts import CallBlock
from mlxstack.text.tokens.cached_tokenizer import Prompt, Splice

Scope = tuple[str, str]
"""Scope of a conversation: tenant salt and name."""

NAMELESS: Scope = ("", "")


class SampledAnswer(Struct, frozen=True):
    """Complete answer and its sampled tokens, without the turn's end."""

    message: Message
    tokens: tuple[int, ...]


class PromptSplicer:
    """Text that stands for other tokens. Callable by any thread.

    These methods are those of a kind that does nothing.
    """

    def prepare(self, conversation: Conversation) -> Conversation:
        """The conversation as the template can show it."""
        return conversation

    def text_runs(self, text: str) -> list[str]:
        """Stretches of a message that the template writes as they are."""
        return [text]

    def splices(
        self, scope: Scope, conversation: Conversation, adapted: Conversation, rendering: str
    ) -> Sequence[Splice]:
        """Splices of the rendering of `adapted`, in order. Raises BadRequest.

        `conversation` is the prepared one, before it was adapted to the template.
        """
        return ()

    def prompt_fields(
        self, conversation: Conversation, prompt: Prompt, end: int | None
    ) -> dict[str, Any]:
        """Fields of a prompt that this kind fills.

        `end` is the character between messages and the opening of the answer; None if unknown.
        """
        return {}

    def vocabulary_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens with ids of the vocabulary in place of others."""
        return tokens

    def remember_calls(self, scope: Scope, block: CallBlock) -> None:
        """Note sampled calls for later prompts."""

    def remember_answer(self, scope: Scope, prompt: Prompt, answer: SampledAnswer) -> None:
        """Note a sampled answer to `prompt` for later prompts."""


def merged(first: Sequence[Splice], second: Sequence[Splice]) -> list[Splice]:
    """All splices in order, without those of `second` that begin within `first`."""
    starts = [splice.start for splice in first]
    splices = list(first)
    for splice in second:
        n_before = bisect_right(starts, splice.start)
        if n_before == 0 or first[n_before - 1].end <= splice.start:
            splices.append(splice)
    return sorted(splices, key=lambda splice: splice.start)
