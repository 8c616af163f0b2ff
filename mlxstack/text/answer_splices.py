"""Locates sampled answers in a rendered prompt and returns their tokens.

An answer stands where the prompt it answered ended: if the text up to there is still the same,
the place is known. Where it ends is seen in the rendering of the conversation up to this answer.
Only this stretch is replaced, from the opening of the answer to the end of the turn.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.text.answer_replay import AnswerEntry, WrittenAnswer, digest_of_text
from mlxstack.text.cached_tokenizer import CachedTokenizer, Splice
from mlxstack.text.chat_template import TemplateInputs
from mlxstack.text.checkpoint_positions import common_length
from mlxstack.text.special_token_escape import unescape
from mlxstack.text.special_tokens import SpecialTokens
from mlxstack.text.token_bytes import TokenBytes

_WORD = re.compile(r"\w+")
Render = Callable[[Sequence[Message], TemplateInputs], str]


class AnswerSplicer:
    """Finds the answers in the prompts of one model. Callable by any thread.

    `render` renders messages as they came. `marks` are texts that structure an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        render: Render,
        encoder: CachedTokenizer,
        special_tokens: SpecialTokens,
        marks: Iterable[str],
    ) -> None:
        self._render = render
        self._encoder = encoder
        self._pieces = TokenBytes(tokenizer)
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._eos = [added[at].content for at in self._eos_ids if at in added]
        self._structure = {
            at for at, token in added.items() if token.content in special_tokens.structure
        }
        known = tuple(marks)
        self._marks = {at for at in self._structure if any(added[at].content in m for m in known)}
        self._known_words = set(_words(" ".join(known)))

    def splices(
        self,
        conversation: Conversation,
        known: Mapping[int, AnswerEntry],
        inputs: TemplateInputs,
        marked: str,
    ) -> list[Splice]:
        """The remembered answers in `marked`, the rendering of a conversation, in order."""
        found: list[Splice] = []
        running, n_read = hashlib.blake2b(digest_size=16), 0
        for at, entry in sorted(known.items(), key=lambda item: item[1].n_chars):
            if entry.n_chars > len(marked):
                break
            running.update(marked[n_read : entry.n_chars].encode("utf-8", "surrogatepass"))
            n_read = entry.n_chars
            if running.digest() != entry.digest or (found and found[-1].end > entry.n_chars):
                continue
            end = self._end(conversation.messages, at, entry, inputs, marked)
            if end > entry.n_chars:
                found.append(Splice(entry.n_chars, end, tuple(entry.tokens)))
        return found

    def _end(
        self,
        messages: Sequence[Message],
        at: int,
        entry: AnswerEntry,
        inputs: TemplateInputs,
        marked: str,
    ) -> int:
        """The character where the answer ends; 0 where the template now writes something else."""
        key = _key(inputs)
        written = entry.written
        if written is None or written.key != key:
            text = self._alone(messages[: at + 1], entry, inputs, marked)
            if not text and not (entry.reasoning and _is_answered(messages, at)):
                text = self._closed(entry, marked)
            written = entry.written = WrittenAnswer(key, len(text), digest_of_text(text))
        end = entry.n_chars + written.n_chars
        text = marked[entry.n_chars : end]
        if digest_of_text(text) != written.digest:
            return 0
        # A template that writes no thoughts gets them back only until the user speaks again.
        is_kept = entry.reasoning.strip() in unescape(text) or not _is_answered(messages, at)
        return end if is_kept else 0

    def _alone(
        self, messages: Sequence[Message], entry: AnswerEntry, inputs: TemplateInputs, marked: str
    ) -> str:
        """The answer as it is written where nothing follows it; "" if the prompt has another."""
        bare = replace(inputs, add_generation_prompt=False, continue_final=False)
        try:
            closed = self._render(messages, bare)
        except BadRequest:
            return ""
        body = len(closed.rstrip())
        end = min([body, *(body - len(e) for e in self._eos if closed.endswith(e, 0, body))])
        if not entry.n_chars < end <= common_length(closed, marked):
            return ""
        said = self._text(entry.tokens)
        space = said[len(said.rstrip()) :]
        end += len(space) * marked.startswith(space, end)
        text = marked[entry.n_chars : end]
        return text if self._is_same(entry, text) else ""

    def _closed(self, entry: AnswerEntry, marked: str) -> str:
        """The answer up to the mark that ends its turn, if no more is written than was sampled.

        Some templates write an answer in another way once its results follow.
        """
        ends = [marked.find(eos, entry.n_chars) for eos in self._eos]
        end = min((one for one in ends if one >= 0), default=0)
        text = marked[entry.n_chars : end].rstrip()
        if not text or not self._is_same(entry, text):
            return ""
        written = self._text(self._encoder.encode(text).tokens)
        more = Counter(_words(written)) - Counter(_words(self._text(entry.tokens)))
        ids = set(_words(" ".join(entry.call_ids)))
        return text if set(more) <= self._known_words | ids | {"id"} else ""

    def _is_same(self, entry: AnswerEntry, text: str) -> bool:
        """Whether the sample holds no more than what the template writes, and the thought.

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
        words = Counter(_words(unescape(text)))
        extra = Counter(_words(self._text(sampled))) - words
        return set(extra - Counter(_words(entry.reasoning))) <= self._known_words

    def _opens_no_turn(self, entry: AnswerEntry) -> bool:
        """Whether every mark of the opening that comes again opens an answer again."""
        opening = entry.tokens[: entry.n_opening]
        follows = {a: b for a, b in pairwise(opening) if a in self._structure}
        sampled = entry.tokens[entry.n_opening :]
        return all(follows[a] == b for a, b in pairwise(sampled) if a in follows)

    def _text(self, tokens: Sequence[int]) -> str:
        said = b"".join(b" " if t in self._structure else self._pieces.of(t) for t in tokens)
        return said.decode(errors="replace")


def _is_answered(messages: Sequence[Message], at: int) -> bool:
    """Whether a user speaks after a message, so that a template may drop its thought."""
    return any(message.role is Role.USER for message in messages[at + 1 :])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _key(inputs: TemplateInputs) -> bytes:
    """Digest of the inputs that change how the template writes an answer."""
    said = json.dumps([inputs.tools, inputs.variables], default=str)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
