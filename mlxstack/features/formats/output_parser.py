"""Output parser: reasoning, content, tool calls, stop strings."""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

import msgspec
from mlx_lm.generate import TextStateMachine

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.core.response_parts import (
    AnswerPart,
    ArgumentsPart,
    CallBlock,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
    ToolCallStarted,
)
from mlxstack.features.formats.answer_reader import (
    AnswerReader,
    Break,
    Calls,
    Cut,
    Spoken,
    Unparsed,
)
from mlxstack.features.formats.call_writer import CallEvent
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.features.formats.syntax import DerivedFormat
from mlxstack.features.formats.text_feed import WhitespaceTrimmer
from mlxstack.text.tokens.special_token_escape import ESCAPE_CHAR, unescape

log = logging.getLogger(__name__)
NORMAL = "normal"


class OutputParser:
    """Parses one answer, token by token; not to be shared by threads.

    `tools` are all offered tools, deferred ones too; without any, the marks of a tool call are
    words, as llama-server has it. `stops` count in the answer, not in thoughts or calls.
    `is_in_thinking` and `before` come from the prompt. `is_raw` gives a text completion:
    nothing is a marker and nothing is trimmed. `has_grammar`: a grammar rules the content, in
    which only tokens that no grammar spells are marks.

    `make_id` names a call to which the model gave no id. `n_reasoning` counts tokens spent on
    thoughts, `n_unparsed` calls that did not parse. `blocks` are the tokens of complete calls.
    `is_cut`: a call was lost to the end of the answer, or a part of it.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        make_id: Callable[[], str],
        *,
        tools: Sequence[Tool] = (),
        stops: Sequence[str] = (),
        is_in_thinking: bool = False,
        before: Sequence[int] = (),
        is_raw: bool = False,
        has_grammar: bool = False,
    ) -> None:
        self.n_reasoning = self.n_blocks = self.n_unparsed = 0
        self.is_cut = False
        self.blocks: list[CallBlock] = []
        self._output_format = output_format
        self._is_raw = is_raw
        self._has_grammar = has_grammar
        self._make_id = make_id
        self._ids: set[str] = set()
        self._calls: list[ToolCall] = []
        self._call_id = ""
        is_open = bool(before)
        self._reader = AnswerReader(
            DerivedFormat() if is_raw else output_format.description,
            tools,
            is_in_thinking=is_in_thinking and not is_raw,
            is_open=is_open,
        )
        self._saying = StopStringFilter(stops, is_raw=is_raw, is_open=is_open)
        self._thoughts = WhitespaceTrimmer(is_open=is_open)
        self._tokens: list[int] = []
        self._detokenizer = output_format.pieces.stream(before)

    @property
    def stop(self) -> str | None:
        """The stop word that was met; the answer is over."""
        return self._saying.stop

    def push(self, token: int) -> list[AnswerPart]:
        """The parts that become certain with this token."""
        if self.stop is not None:
            return []
        self._tokens.append(token)
        if self._is_silent(token):
            return []
        was_reasoning = self._reader.is_reasoning
        text = self._detokenizer.push(token)
        n_mark = self._n_mark(token, text)
        text = self._guarded(text[: len(text) - n_mark]) + text[len(text) - n_mark :]
        parts = self._parts(self._reader.feed(text))
        self.n_reasoning += was_reasoning or self._reader.is_reasoning
        return parts

    def finish(self, reason: FinishReason) -> list[AnswerPart]:
        """The parts that were held back, once no token follows."""
        if self.stop is not None:
            return []
        stretches = self._reader.feed(self._guarded(self._detokenizer.finish()))
        stretches += self._reader.finish(is_whole=reason is FinishReason.EOS)
        parts = self._parts(stretches)
        if self.stop is None:
            parts = _joined([*parts, *_content(self._saying.finish())])
        return parts

    def _guarded(self, text: str) -> str:
        """Text without marks, where a grammar rules the content."""
        if not self._has_grammar or self._reader.is_reasoning or self._reader.is_in_call:
            return text
        return "".join(ESCAPE_CHAR + character for character in text)

    def _n_mark(self, token: int, text: str) -> int:
        """Number of characters at the end that a mark wrote."""
        if token not in self._output_format.unspellable:
            return 0
        mark = self._output_format.pieces.of(token).decode(errors="replace")
        if text.endswith(mark):
            return len(mark)
        return 0

    def _is_silent(self, token: int) -> bool:
        if token in self._output_format.eos or self._output_format.pieces.piece(token) is None:
            return True
        if self._is_raw:
            return token in self._output_format.special
        return token in self._output_format.hidden and not self._reader.is_in_call

    def _parts(self, stretches: Iterable[Spoken]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for stretch in stretches:
            parts += self._part(stretch)
            if self.stop is not None:
                break
        return _joined(parts)

    def _part(self, stretch: Spoken) -> list[AnswerPart]:
        match stretch:
            case ReasoningPart():
                thought = self._thoughts.push(stretch.text)
                return [ReasoningPart(thought)] if thought else []
            case ContentPart():
                return _content(self._saying.push(unescape(stretch.text)))
            case Break():
                self._thoughts.finish()
                return _content(self._saying.leave())
            case ToolCallStarted() | ArgumentsPart() | ToolCallPart():
                return [self._call_part(stretch)]
            case Calls():
                self._end_block(stretch)
            case Unparsed():
                self.n_unparsed += 1
                name = self._output_format.description.name
                log.warning(
                    "tool call does not parse as %s; passed through as text: %.200r",
                    name,
                    stretch.raw,
                )
                return self._part(ContentPart(stretch.raw))
            case Cut():
                self.is_cut = True
        return []

    def _call_part(self, event: CallEvent) -> AnswerPart:
        """The part with an id that is unique in this answer."""
        match event:
            case ToolCallStarted():
                self._call_id = self._unique(event.id)
            case ToolCallPart():
                self.is_cut = self.is_cut or event.is_cut
                if not event.is_cut:
                    self._calls.append(ToolCall(self._call_id, event.name, event.arguments))
            case ArgumentsPart():
                return event
        return msgspec.structs.replace(event, id=self._call_id)

    def _end_block(self, stretch: Calls) -> None:
        self.n_blocks += 1
        calls = tuple(self._calls)
        self._calls = []
        block = self._block(calls, stretch)
        if block is not None:
            self.blocks.append(block)

    def _block(self, calls: tuple[ToolCall, ...], stretch: Calls) -> CallBlock | None:
        """Tokens of the last text; None where tokens cross its edges."""
        sampled = self._tokens
        self._tokens = []
        pieces = [self._output_format.pieces.of(token) for token in sampled]
        raw = stretch.raw.encode()
        start = b"".join(pieces).rfind(raw)
        edges = list(accumulate(map(len, pieces), initial=0))
        if start not in edges or start + len(raw) not in edges:
            return None
        # A token without text of its own belongs to the token that follows.
        first = edges.index(start)
        stop = edges.index(start + len(raw))
        is_closed = stretch.is_closed and bool(self._output_format.call_markers.end)
        return CallBlock(calls, tuple(sampled[first:stop]), is_closed)

    def _unique(self, call_id: str) -> str:
        """An id that no other call of this answer has."""
        if not call_id or call_id in self._ids:
            call_id = self._make_id()
        self._ids.add(call_id)
        return call_id


def _content(text: str) -> list[AnswerPart]:
    if text:
        return [ContentPart(text)]
    return []


def _joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Neighbors of one kind as one."""
    joined: list[AnswerPart] = []
    for kind, group in groupby(parts, type):
        if kind in (ContentPart, ReasoningPart, ArgumentsPart):
            joined.append(kind("".join(part.text for part in group)))  # type: ignore[union-attr]
        else:
            joined += group
    return joined


class StopStringFilter:
    """The answer itself. `stop` is the stop word that was met.

    `is_raw` text is not trimmed; `is_open` speech goes on in the middle of a line.
    """

    def __init__(self, stops: Sequence[str], *, is_raw: bool, is_open: bool) -> None:
        self.stop: str | None = None
        self._stops = tuple(word for word in stops if word)
        self._state = _stop_state(self._stops)
        self._edges = None if is_raw else WhitespaceTrimmer(is_open=is_open)

    def push(self, text: str) -> str:
        """Text to emit now, without stop strings or their beginnings."""
        self._state, segments = TextStateMachine.split(self._state, text)
        emitted = self._trimmed(segments[0][1])
        if len(segments) > 1:
            self.stop = self._stops[int(segments[1][0])]
            emitted += self._rest()
        return emitted

    def leave(self) -> str:
        """Return held-back text without trailing white space, as something else follows."""
        return self.finish().rstrip()

    def finish(self) -> str:
        """Return held-back text; nothing follows."""
        return self._trimmed(self._flushed()) + self._rest()

    def _flushed(self) -> str:
        self._state, held, _ = TextStateMachine.flush(self._state)
        return str(held)

    def _trimmed(self, text: str) -> str:
        if self._edges is None:
            return text
        return self._edges.push(text)

    def _rest(self) -> str:
        if self._edges is None:
            return ""
        return self._edges.finish()


def _stop_state(stops: tuple[str, ...]) -> Any:
    """State that leaves NORMAL for the number of the first complete word."""
    edges = [(word, str(number)) for number, word in enumerate(stops)]
    machine = TextStateMachine({NORMAL: edges, **{name: [] for _, name in edges}})
    return machine.make_state(NORMAL)
