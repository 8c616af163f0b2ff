"""Replay: sampled tokens of earlier answers and tool calls in later prompts.

A template writes an answer in its own way: without the thoughts, without the opening that the
prompt had, with other spaces. Every difference would cost the rest of the cached conversation.

An answer stands where the prompt it answered ended: if the text up to there is still the same,
the place is known. Where it ends is seen in the rendering of the conversation up to this answer.
Only this stretch is replaced, from the opening of the answer to the end of the turn. All other
text of a prompt is the template's for the request alone, whatever is remembered.

Calls are remembered apart, by their ids: clients send their arguments back as JSON of their own
making, and templates print them in a third way.
"""

import hashlib
import json
import re
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.core.response_parts import CallBlock
from mlxstack.text.prompt.splicer import SampledAnswer, Scope
from mlxstack.text.template.chat_template import closed
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Prompt, Splice, common_length
from mlxstack.text.tokens.special_token_escape import unescape
from mlxstack.text.tokens.token_decoder import TokenDecoder

_WORD = re.compile(r"\w+")
Render = Callable[[Conversation], str]

PROBE = "text"
PROBE_THOUGHT = "sxthought0"
MAX_PROBES = 64
ANSWER_BYTES = 1024
"""Bytes of an answer beside its tokens: digests, thought, containers."""
CALL_BYTES = 512
"""Bytes of a call beside its tokens: digests, ids, containers."""


class Sketch(Struct, frozen=True):
    """Rendered block: its length in characters, and a digest.

    A length of 0: it writes something else. `lead` is the offset of the name or id that the
    block is found by. `key` says what it was rendered with.
    """

    key: bytes
    lead: int = 0
    n_chars: int = 0
    digest: bytes = b""


class Entry:
    """Remembered block; `sketch` is its latest rendering, None before."""

    def __init__(self, block: CallBlock) -> None:
        self.tokens = array("I", block.tokens)
        self.calls = tuple(digest_of(call) for call in block.calls)
        self.is_closed = block.is_closed
        self.sketch: Sketch | None = None
        self.n_bytes = 4 * len(block.tokens) + CALL_BYTES * len(block.calls)


class HasBytes(Protocol):
    """Entry of known size."""

    n_bytes: int


K = TypeVar("K")
E = TypeVar("E", bound=HasBytes)


class ReplayMemory(Generic[K, E]):
    """Latest entries by key, at most `max_bytes` in all. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, E] = OrderedDict()
        self.n_bytes = 0

    def get(self, key: K) -> E | None:
        """The entry of this key, if it is still known."""
        with self._lock:
            return self._entries.get(key)

    def put(self, key: K, entry: E) -> None:
        """Remember an entry in place of an earlier one of its key."""
        with self._lock:
            if (old := self._entries.pop(key, None)) is not None:
                self.n_bytes -= old.n_bytes
            self._entries[key] = entry
            self.n_bytes += entry.n_bytes
            while self.n_bytes > self._max:
                self.n_bytes -= self._entries.popitem(last=False)[1].n_bytes


class ToolCallReplay(ReplayMemory[tuple[Scope, str], Entry]):
    """Latest blocks by conversation and first call id. Thread-safe."""

    def __init__(self, max_bytes: int = 16_000_000) -> None:
        super().__init__(max_bytes)

    def remember(self, scope: Scope, block: CallBlock) -> None:
        """Keep a sampled block for the later prompts of its conversation.

        Arguments nested too deeply to be compared are left out.
        """
        try:
            entry = Entry(block)
        except RecursionError:
            return
        self.put((scope, block.calls[0].id), entry)

    def known(self, scope: Scope, calls: Sequence[ToolCall]) -> dict[int, Entry]:
        """Remembered blocks of a turn, by index of the first call.

        Each call of a block must come back with the same id, name and arguments.
        """
        blocks: dict[int, Entry] = {}
        index = 0
        while index < len(calls):
            entry = self.get((scope, calls[index].id))
            if entry is not None and _is_same(entry, calls[index : index + len(entry.calls)]):
                blocks[index] = entry
                index += len(entry.calls)
            else:
                index += 1
        return blocks


def digest_of(call: ToolCall) -> bytes:
    """Digest of a call, which distinguishes 1, 1.0 and true."""
    spelled = json.dumps([call.id, call.name, call.arguments], sort_keys=True, default=str)
    return hashlib.blake2b(spelled.encode(), digest_size=16).digest()


def _is_same(entry: Entry, calls: Sequence[ToolCall]) -> bool:
    return entry.calls == tuple(digest_of(call) for call in calls)


class WrittenAnswer(Struct, frozen=True):
    """Rendered answer: its length in characters, and a digest.

    A length of 0: it writes something else. `key` says what it was rendered with.
    """

    key: bytes
    n_chars: int = 0
    digest: bytes = b""


class AnswerPlace(Struct, frozen=True):
    """An answer in its conversation."""

    conversation: Conversation
    index: int
    """Its place among the messages."""
    key: bytes
    """Digest of tools and variables."""

    @property
    def message(self) -> Message:
        """The answer as the client sent it."""
        return self.conversation.messages[self.index]

    @property
    def is_answered(self) -> bool:
        """Whether a user turn follows; templates may drop the thought."""
        return any(
            message.role is Role.USER for message in self.conversation.messages[self.index + 1 :]
        )


class AnswerEntry:
    """Remembered answer; `written` is its latest rendering, None before.

    `n_chars` and `digest` say what the template wrote before it. The first `n_opening` of its
    `tokens` are those with which the prompt opened it.
    """

    def __init__(self, before: str, opening: tuple[int, ...], answer: SampledAnswer) -> None:
        self.n_chars = len(before)
        self.digest = digest_of_text(before)
        self.tokens = array("I", (*opening, *answer.tokens))
        self.n_opening = len(opening)
        self.reasoning = answer.message.reasoning or ""
        self.call_ids = tuple(call.id for call in answer.message.tool_calls)
        self.written: WrittenAnswer | None = None
        self.n_bytes = 4 * len(self.tokens) + len(self.reasoning) + ANSWER_BYTES


class AnswerReplay(ReplayMemory[tuple[Scope, bytes, bytes], AnswerEntry]):
    """The latest answers by conversation, history and meaning. Thread-safe."""

    def __init__(self, max_bytes: int = 32_000_000) -> None:
        super().__init__(max_bytes)

    def remember(self, scope: Scope, prompt: Prompt, answer: SampledAnswer) -> None:
        """Keep a sampled answer to `prompt` for later prompts.

        Arguments nested too deeply to be compared are left out. So is an answer without text and
        calls: it may have ended inside a thought that its prompt opened, which no template writes.
        """
        is_said = answer.message.text.strip() or answer.message.tool_calls
        if prompt.answer_at is None or not is_said:
            return
        try:
            key = (scope, prompt.history, meaning(answer.message))
        except RecursionError:
            return
        n_chars, n_tokens = prompt.answer_at
        opening = prompt.tokens[n_tokens:]
        self.put(key, AnswerEntry(prompt.marked[:n_chars], opening, answer))

    def known(self, scope: Scope, messages: Sequence[Message]) -> dict[int, AnswerEntry]:
        """The remembered answers among these messages, by index.

        Text and calls must come back as they were said; a thought may be left out.
        """
        entries: dict[int, AnswerEntry] = {}
        if not self.n_bytes:
            return entries
        digests = histories(messages)
        for index, message in enumerate(messages):
            if message.role is not Role.ASSISTANT:
                continue
            try:
                key = (scope, digests[index], meaning(message))
            except RecursionError:
                continue
            entry = self.get(key)
            thought = (message.reasoning or "").strip()
            if entry is not None and thought in ("", entry.reasoning.strip()):
                entries[index] = entry
        return entries


def histories(messages: Iterable[Message]) -> list[bytes]:
    """Digests of the history before each message, and after the last."""
    running = hashlib.blake2b(digest_size=16)
    digests = [running.digest()]
    for message in messages:
        names = [name for call in message.tool_calls for name in (call.id, call.name)]
        for field in (message.role, message.text, message.tool_call_id or "", *names):
            data = field.encode("utf-8", "surrogatepass")
            running.update(b"%d " % len(data) + data)
        digests.append(running.digest())
    return digests


def meaning(message: Message) -> bytes:
    """A digest of the text and the calls of an answer."""
    digest = hashlib.blake2b(message.text.strip().encode("utf-8", "surrogatepass"), digest_size=16)
    for call in message.tool_calls:
        digest.update(digest_of(call))
    return digest.digest()


def digest_of_text(text: str) -> bytes:
    """A digest of a rendered text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def ids_of(added: Mapping[int, Any], contents: Container[str]) -> set[int]:
    """Ids of added tokens by their texts."""
    return {id_ for id_, token in added.items() if token.content in contents}


class AnswerSplicer:
    """Finds answers in the prompts of one model. Thread-safe.

    `render` renders messages as they came. `marks` are texts that structure an answer.
    """

    def __init__(self, encoder: CachedTokenizer, render: Render, marks: Iterable[str]) -> None:
        tokenizer = encoder.tokenizer
        self._render = render
        self._encoder = encoder
        self._pieces = TokenDecoder(tokenizer)
        self._keeps: dict[bytes, bool] = {}
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._eos = [added[token].content for token in self._eos_ids if token in added]
        self._structure = ids_of(added, encoder.special_tokens.structure)
        texts = tuple(marks)
        self._marks = {
            id_ for id_ in self._structure if any(added[id_].content in text for text in texts)
        }
        self._known_words = set(_terms(" ".join(texts)))

    def splices(
        self, conversation: Conversation, entries: Mapping[int, AnswerEntry], marked: str
    ) -> list[Splice]:
        """The remembered answers in `marked`, the rendering of a conversation, in order."""
        splices: list[Splice] = []
        key = _key(conversation)
        running = hashlib.blake2b(digest_size=16)
        n_read = 0
        for index, entry in sorted(entries.items(), key=lambda item: item[1].n_chars):
            if entry.n_chars > len(marked):
                break
            running.update(marked[n_read : entry.n_chars].encode("utf-8", "surrogatepass"))
            n_read = entry.n_chars
            if running.digest() != entry.digest or (splices and splices[-1].end > entry.n_chars):
                continue
            place = AnswerPlace(conversation, index, key)
            end = self._end(place, entry, marked)
            if end > entry.n_chars:
                splices.append(Splice(entry.n_chars, end, tuple(entry.tokens)))
        return splices

    def _end(self, place: AnswerPlace, entry: AnswerEntry, marked: str) -> int:
        """Character where the answer ends; 0 after another rendering."""
        key = place.key + bytes([place.is_answered])
        written = entry.written
        if written is None or written.key != key:
            text = self._alone(place, entry, marked)
            if not text and not (entry.reasoning and place.is_answered):
                text = self._closed(entry, marked)
            written = entry.written = WrittenAnswer(key, len(text), digest_of_text(text))
        end = entry.n_chars + written.n_chars
        text = marked[entry.n_chars : end]
        if digest_of_text(text) != written.digest:
            return 0
        # A thought that the template does not keep comes back only until the user speaks again.
        is_kept = (
            not place.is_answered
            or entry.reasoning.strip() in unescape(text)
            or (not place.message.reasoning and self._keeps_thought(place))
        )
        return end if is_kept else 0

    def _keeps_thought(self, place: AnswerPlace) -> bool:
        """Whether the template keeps a thought after the next user message."""
        key = place.key + bytes([bool(place.message.tool_calls)])
        keeps = self._keeps.get(key)
        if keeps is None:
            calls = place.message.tool_calls[:1]
            results = [Message(Role.TOOL, PROBE, tool_call_id=c.id, name=c.name) for c in calls]
            answer = Message(Role.ASSISTANT, PROBE, reasoning=PROBE_THOUGHT, tool_calls=calls)
            user = Message(Role.USER, PROBE)
            try:
                messages = (user, answer, *results, user)
                text = self._render(closed(place.conversation, messages))
            except BadRequest:
                text = ""
            keeps = PROBE_THOUGHT in unescape(text)
            if len(self._keeps) >= MAX_PROBES:
                self._keeps.clear()
            self._keeps[key] = keeps
        return keeps

    def _alone(self, place: AnswerPlace, entry: AnswerEntry, marked: str) -> str:
        """Answer as rendered last; "" if the prompt has another."""
        try:
            messages = place.conversation.messages[: place.index + 1]
            text = self._render(closed(place.conversation, messages))
        except BadRequest:
            return ""
        body = len(text.rstrip())
        end = min([body, *(body - len(e) for e in self._eos if text.endswith(e, 0, body))])
        if not entry.n_chars < end <= common_length(text, marked):
            return ""
        sampled = self._text(entry.tokens)
        space = sampled[len(sampled.rstrip()) :]
        end += len(space) * marked.startswith(space, end)
        text = marked[entry.n_chars : end]
        if self._is_same(entry, text):
            return text
        return ""

    def _closed(self, entry: AnswerEntry, marked: str) -> str:
        """Answer up to its turn end, if rendered as sampled.

        Some templates write an answer in another way once its results follow.
        """
        ends = [marked.find(eos, entry.n_chars) for eos in self._eos]
        end = min((place for place in ends if place >= 0), default=0)
        text = marked[entry.n_chars : end].rstrip()
        if not text or not self._is_same(entry, text):
            return ""
        written = self._text(self._encoder.encode(text).tokens)
        more = Counter(_terms(written)) - Counter(_terms(self._text(entry.tokens)))
        ids = set(_terms(" ".join(entry.call_ids)))
        if set(more) <= self._known_words | ids | {"id"}:
            return text
        return ""

    def _is_same(self, entry: AnswerEntry, text: str) -> bool:
        """Whether the sample holds just the rendered answer and thought.

        A parser passes over what it does not know; that must not come back as if it had been
        meant.
        """
        sampled = entry.tokens[entry.n_opening :]
        tokens = self._encoder.encode(text).tokens
        written = {t for t in tokens if t in self._structure}
        marks = [t for t in sampled if t in self._structure]
        if self._eos_ids.intersection(sampled) or not written.union(self._marks).issuperset(marks):
            return False
        if not self._opens_no_turn(entry):
            return False
        expected = Counter(_terms(unescape(text)))
        extra = Counter(_terms(self._text(sampled))) - expected
        return set(extra - Counter(_terms(entry.reasoning))) <= self._known_words

    def _opens_no_turn(self, entry: AnswerEntry) -> bool:
        """Whether repeated marks of the opening always open an answer."""
        opening = entry.tokens[: entry.n_opening]
        follows = {a: b for a, b in pairwise(opening) if a in self._structure}
        sampled = entry.tokens[entry.n_opening :]
        return all(follows[a] == b for a, b in pairwise(sampled) if a in follows)

    def _text(self, tokens: Sequence[int]) -> str:
        data = b"".join(b" " if t in self._structure else self._pieces.of(t) for t in tokens)
        return data.decode(errors="replace")


def _terms(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _key(conversation: Conversation) -> bytes:
    """Digest of the inputs that change how the template writes an answer."""
    spelled = json.dumps([conversation.tools, conversation.template], default=str)
    return hashlib.blake2b(spelled.encode(), digest_size=16).digest()
