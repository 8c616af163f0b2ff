"""Sampled answers, kept as tokens for the later prompts of their conversation.

A template writes an answer in its own way: without the thoughts, without the opening that the
prompt had, with other spaces. Every difference would cost the rest of the cached conversation.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from mlxstack.core.conversation import Message, Role
from mlxstack.text.tool_call_replay import Scope, digest_of

ANSWER_BYTES = 1024
"""The room of one answer beside its tokens: digests, thought and containers, rounded up."""


class AnswerAnchor(Struct, frozen=True):
    """Where the answer to a prompt begins.

    `history` is a digest of the messages before it, `n_chars` and `digest` say what the template
    wrote for them. `opening` are the tokens with which the prompt opens the answer.
    """

    history: bytes
    n_chars: int
    digest: bytes
    opening: tuple[int, ...] = ()


class SampledAnswer(Struct, frozen=True):
    """A complete answer, and the tokens sampled for it, the end of the turn left out."""

    message: Message
    tokens: tuple[int, ...]


class WrittenAnswer(Struct, frozen=True):
    """How the template writes an answer: its length in characters, and a digest of them.

    A length of 0: it writes something else. `key` says what it was rendered with.
    """

    key: bytes
    n_chars: int = 0
    digest: bytes = b""


class AnswerEntry:
    """A remembered answer; `written` is the latest word of the template, None before the first."""

    def __init__(self, anchor: AnswerAnchor, answer: SampledAnswer) -> None:
        self.n_chars = anchor.n_chars
        self.digest = anchor.digest
        self.tokens = array("I", (*anchor.opening, *answer.tokens))
        self.n_opening = len(anchor.opening)
        self.reasoning = answer.message.reasoning or ""
        self.call_ids = tuple(call.id for call in answer.message.tool_calls)
        self.written: WrittenAnswer | None = None
        self.n_bytes = 4 * len(self.tokens) + len(self.reasoning) + ANSWER_BYTES


class AnswerReplay:
    """The latest answers by conversation, history and meaning. Callable by any thread.

    At most `max_bytes` in all; the oldest ones are forgotten.
    """

    def __init__(self, max_bytes: int = 32_000_000) -> None:
        self._max = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Scope, bytes, bytes], AnswerEntry] = OrderedDict()
        self.n_bytes = 0

    def remember(self, scope: Scope, anchor: AnswerAnchor, answer: SampledAnswer) -> None:
        """Keep a sampled answer for the later prompts of its conversation.

        Arguments nested too deeply to be compared are left out. So is an answer without text and
        calls: it may have ended inside a thought that its prompt opened, which no template writes.
        """
        if not answer.message.text.strip() and not answer.message.tool_calls:
            return
        try:
            key = (scope, anchor.history, meaning(answer.message))
        except RecursionError:
            return
        entry = AnswerEntry(anchor, answer)
        with self._lock:
            if (old := self._entries.pop(key, None)) is not None:
                self.n_bytes -= old.n_bytes
            self._entries[key] = entry
            self.n_bytes += entry.n_bytes
            while self.n_bytes > self._max:
                self.n_bytes -= self._entries.popitem(last=False)[1].n_bytes

    def known(self, scope: Scope, messages: Sequence[Message]) -> dict[int, AnswerEntry]:
        """The remembered answers among these messages, by index.

        Text and calls must come back as they were said; a thought may be left out.
        """
        found: dict[int, AnswerEntry] = {}
        with self._lock:
            is_empty = not self._entries
        if is_empty:
            return found
        for at, (message, history) in enumerate(zip(messages, histories(messages), strict=False)):
            if message.role is not Role.ASSISTANT:
                continue
            try:
                key = (scope, history, meaning(message))
            except RecursionError:
                continue
            with self._lock:
                entry = self._entries.get(key)
            thought = (message.reasoning or "").strip()
            if entry is not None and thought in ("", entry.reasoning.strip()):
                found[at] = entry
        return found


def histories(messages: Iterable[Message]) -> list[bytes]:
    """A digest of what was said before each message, and before one that may follow."""
    running = hashlib.blake2b(digest_size=16)
    digests = [running.digest()]
    for message in messages:
        names = [name for call in message.tool_calls for name in (call.id, call.name)]
        for said in (message.role, message.text, message.tool_call_id or "", *names):
            data = said.encode("utf-8", "surrogatepass")
            running.update(b"%d " % len(data) + data)
        digests.append(running.digest())
    return digests


def meaning(message: Message) -> bytes:
    """A digest of the text and the calls of an answer."""
    said = hashlib.blake2b(message.text.strip().encode("utf-8", "surrogatepass"), digest_size=16)
    for call in message.tool_calls:
        said.update(digest_of(call))
    return said.digest()


def digest_of_text(text: str) -> bytes:
    """A digest of a rendered text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
