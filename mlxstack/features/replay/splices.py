"""Locates sampled tool calls in a rendered prompt and returns their tokens.

The prompt is rendered a second time with a sentinel at the name and the id of each remembered
call. Without the sentinels both texts must be equal; so the sentinels say where the template
writes each call. Around it lies the text that the template gives to the same call in a
conversation of nothing else: only this text, at this place, is replaced.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.core.interfaces import CallMarkers
from mlxstack.features.replay.answer_replay import (
    Entry,
    Sketch,
    ToolCallReplay,
    digest_of_text,
    ids_of,
)
from mlxstack.text.prompt.splicer import Scope
from mlxstack.text.template.chat_template import ChatTemplate, closed
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Prompt, Splice
from mlxstack.text.tokens.special_token_escape import unescape
from mlxstack.text.tokens.token_decoder import TokenDecoder

# Noncharacters, like the guard's mark: no honest text contains them.
OPENS = "\ufdd2"
CLOSES = "\ufdd3"
FILLER = "\ufdd1"
_SENTINEL = re.compile(f"{OPENS}([0-9]+){CLOSES}")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_WORD = re.compile(r"\w+")


class Turn(Struct, frozen=True):
    """Assistant turn with remembered blocks."""

    index: int
    blocks: Mapping[int, Entry]
    """By index of their first calls."""


class Probe(Struct, frozen=True):
    """A rendered text, and where it names each numbered call."""

    text: str
    places: Mapping[int, Sequence[int]]


class CallSplicer:
    """Finds sampled calls in prompts. Callable by any thread."""

    def __init__(
        self, encoder: CachedTokenizer, template: ChatTemplate, call_markers: CallMarkers
    ) -> None:
        tokenizer = encoder.tokenizer
        self.replay = ToolCallReplay()
        self._template = template
        self._encoder = encoder
        self._call_markers = call_markers
        self._pieces = TokenDecoder(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._eos = [added[token].content for token in tokenizer.eos_token_ids if token in added]
        self._structure = ids_of(added, encoder.special_tokens.structure)
        self._optional = ids_of(added, call_markers.optional)

    def splices(self, scope: Scope, adapted: Conversation, marked: str) -> tuple[Splice, ...]:
        """Remembered calls in `marked`, the rendering of a conversation, in order."""
        turns = [
            Turn(index, blocks)
            for index, message in enumerate(adapted.messages)
            if message.tool_calls and (blocks := self.replay.known(scope, message.tool_calls))
        ]
        if not turns or OPENS in marked:
            return ()
        firsts = [(turn.index, first) for turn in turns for first in turn.blocks]
        numbers = {place: number for number, place in enumerate(firsts)}
        probe = self._probe(adapted, numbers)
        if probe is None or probe.text != marked:
            return ()
        splices: list[Splice] = []
        for turn in turns:
            sketches = self._sketches(adapted, turn)
            for first, sketch in sketches.items():
                places = probe.places.get(numbers[turn.index, first], ())
                start = _start(marked, sketch, places, splices[-1].end if splices else 0)
                if start is not None:
                    tokens = tuple(turn.blocks[first].tokens)
                    splices.append(Splice(start, start + sketch.n_chars, tokens))
        return tuple(splices)

    def _probe(self, adapted: Conversation, numbers: Mapping[tuple[int, int], int]) -> Probe | None:
        """The rendering with sentinels, taken apart; None if the template refuses them."""
        try:
            messages = self._numbered(adapted.messages, numbers)
            text = self._template.render(replace(adapted, messages=messages))
        except BadRequest:
            return None
        parts = []
        n_chars = 0
        end = 0
        places: dict[int, list[int]] = {}
        for match in _SENTINEL.finditer(text):
            parts.append(text[end : match.start()])
            n_chars += len(parts[-1])
            end = match.end()
            places.setdefault(int(match[1]), []).append(n_chars)
        return Probe("".join([*parts, text[end:]]), places)

    def _numbered(
        self, messages: Sequence[Message], numbers: Mapping[tuple[int, int], int]
    ) -> tuple[Message, ...]:
        """Messages with sentinels; results name calls by marked ids."""
        has_ids = not self._template.capabilities.needs_short_ids
        ids: dict[str, str] = {}
        marked = []
        for position, message in enumerate(messages):
            calls = []
            for index, call in enumerate(message.tool_calls):
                n = numbers.get((position, index))
                sign = "" if n is None else f"{OPENS}{n}{CLOSES}"
                if has_ids:
                    ids[call.id] = sign + call.id
                calls.append(replace(call, id=ids.get(call.id, call.id), name=sign + call.name))
            answered = message.tool_call_id
            if answered is not None:
                answered = ids.get(answered, answered)
            marked.append(replace(message, tool_calls=tuple(calls), tool_call_id=answered))
        return tuple(marked)

    def _sketches(self, adapted: Conversation, turn: Turn) -> dict[int, Sketch]:
        """Rendered blocks, without those that mean something else."""
        calls = adapted.messages[turn.index].tool_calls
        blocks = turn.blocks
        key = _key(calls, adapted)
        if any(entry.sketch is None or entry.sketch.key != key for entry in blocks.values()):
            probe = self._alone(calls, adapted)
            for first, entry in blocks.items():
                sketch = None if probe is None else self._sketch(probe, first, entry, key)
                entry.sketch = sketch or Sketch(key)
        sketches: dict[int, Sketch] = {}
        for first, entry in blocks.items():
            if entry.sketch is not None and entry.sketch.n_chars:
                sketches[first] = entry.sketch
        return sketches

    def _alone(self, calls: Sequence[ToolCall], adapted: Conversation) -> Probe | None:
        """A conversation of nothing but these calls, all of them numbered."""
        results = [Message(Role.TOOL, FILLER, tool_call_id=c.id, name=c.name) for c in calls]
        messages = [
            Message(Role.USER, FILLER),
            Message(Role.ASSISTANT, tool_calls=tuple(calls)),
            *results,
        ]
        numbers = {(1, index): index for index in range(len(calls))}
        return self._probe(closed(adapted, messages), numbers)

    def _sketch(self, probe: Probe, first: int, entry: Entry, key: bytes) -> Sketch | None:
        last = first + len(entry.calls) - 1
        for place in probe.places.get(first, ()):
            start = self._opening(probe.text, place)
            end = self._closing(probe, place, last, is_closed=entry.is_closed)
            if start is None or end is None:
                continue
            text = probe.text[start:end]
            # A mark that only another turn mentions lies beyond the filler.
            if FILLER not in text and self._is_same(entry.tokens, self._encoder.encode(text)):
                return Sketch(key, place - start, len(text), digest_of_text(text))
        return None

    def _opening(self, text: str, place: int) -> int | None:
        """Start of the block whose first call is named at `place`."""
        header = self._call_markers.header
        start = text.rfind(header or self._call_markers.start, 0, place)
        if start < 0:
            return None
        return start + len(header)

    def _closing(self, probe: Probe, place: int, last: int, *, is_closed: bool) -> int | None:
        """End of the block around `place` whose last call is `last`."""
        text = probe.text
        mark = self._call_markers.end
        name = next((offset for offset in probe.places.get(last, ()) if offset >= place), None)
        if name is None:
            return None
        if mark:
            end = text.find(mark, name)
            if end < 0:
                return None
            return end + len(mark) * is_closed
        ends = [text.find(eos, name) for eos in self._eos]
        return min((end for end in ends if end >= 0), default=None)

    def _is_same(self, sampled: Sequence[int], written: Prompt) -> bool:
        """Whether the template writes the marks and the words that were sampled.

        A parser passes over what it does not know, and over a key that comes twice; such words
        must not come back under the name of the call.
        """
        if self._marks(sampled) != self._marks(written.tokens):
            return False
        return self._terms(sampled) <= self._terms(written.tokens)

    def _marks(self, tokens: Sequence[int]) -> Counter[int]:
        return Counter(t for t in tokens if t in self._structure and t not in self._optional)

    def _terms(self, tokens: Sequence[int]) -> Counter[str]:
        data = b"".join(b" " if t in self._structure else self._pieces.of(t) for t in tokens)
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), data.decode(errors="replace"))
        return Counter(_WORD.findall(unescape(text).casefold()))


def _start(marked: str, sketch: Sketch, places: Sequence[int], least: int) -> int | None:
    """Start of the block, if its exact text is there."""
    for place in places:
        start = place - sketch.lead
        text = marked[max(0, start) : start + sketch.n_chars]
        if start >= least and digest_of_text(text) == sketch.digest:
            return start
    return None


def _key(calls: Sequence[ToolCall], adapted: Conversation) -> bytes:
    """Digest of the inputs that change how the template writes these calls."""
    ids = [call.id for call in calls]
    return digest_of_text(json.dumps([ids, adapted.tools, adapted.template], default=str))
