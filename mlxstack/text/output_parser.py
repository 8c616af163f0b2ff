"""Output parser and detokenizer: reasoning, content, tool calls, stop strings."""

import logging
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import msgspec
from mlx_lm.generate import TextStateMachine
from msgspec import Struct

from mlxstack.core.conversation import ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.text.formats.answer_reader import (
    Break,
    Calls,
    Content,
    Cut,
    Spoken,
    Thought,
    Unparsed,
)
from mlxstack.text.formats.text_feed import WhitespaceTrimmer
from mlxstack.text.output_format import OutputFormat, ParseOptions
from mlxstack.text.tool_call_replay import Block

log = logging.getLogger(__name__)
NORMAL = "normal"

__all__ = [
    "Delta",
    "OutputParser",
    "ParseOptions",
    "ReasoningPiece",
    "StopMatched",
    "TextPiece",
    "ToolCallPiece",
]


class ReasoningPiece(Struct, frozen=True):
    """A stretch of reasoning."""

    text: str


class TextPiece(Struct, frozen=True):
    """Stretch of the answer; `is_unparsed`: an invalid call with its marks."""

    text: str
    is_unparsed: bool = False


class ToolCallPiece(Struct, frozen=True):
    """Complete tool call; a block's last has the block's tokens."""

    call: ToolCall
    block: Block | None = None


class StopMatched(Struct, frozen=True):
    """Stop string is complete; it and all after are dropped."""

    word: str


Delta = ReasoningPiece | TextPiece | ToolCallPiece | StopMatched


class OutputParser:
    """Parses one answer, token by token; not to be shared by threads.

    `make_id` names a call to which the model gave no id. `n_reasoning` counts tokens spent on
    thoughts, `n_calls` complete calls, `n_unparsed` calls that made no sense. `is_cut`: a call
    was lost to the end of the answer.
    """

    def __init__(
        self, output_format: OutputFormat, parse_options: ParseOptions, make_id: Callable[[], str]
    ) -> None:
        self.n_reasoning = self.n_calls = self.n_unparsed = 0
        self.is_cut = False
        self._output_format = output_format
        self._is_raw = parse_options.is_raw
        self._make_id = make_id
        self._ids: set[str] = set()
        self._reader = output_format.reader(parse_options)
        is_open = bool(parse_options.before)
        self._saying = StopStringFilter(
            parse_options.stops, is_raw=parse_options.is_raw, is_open=is_open
        )
        self._thoughts = WhitespaceTrimmer(is_open=is_open)
        self._tokens: list[int] = []
        self._letters = output_format.tokenizer.detokenizer
        self._known = self._prime(parse_options.before)

    @property
    def stop(self) -> str | None:
        """The stop word that was met; the answer is over."""
        return self._saying.stop

    def push(self, token: int) -> list[Delta]:
        """The deltas that become certain with this token."""
        if self._is_over():
            return []
        self._tokens.append(token)
        if self._is_silent(token):
            return []
        self._letters.add_token(token)
        was_reasoning = self._reader.is_reasoning
        deltas = self._deltas(self._reader.feed(self._new_text()))
        self.n_reasoning += was_reasoning or self._reader.is_reasoning
        return deltas

    def finish(self, reason: FinishReason) -> list[Delta]:
        """The deltas that were held back, once no token follows."""
        if self._is_over():
            return []
        self._letters.finalize()
        spoken = self._reader.feed(self._new_text().rstrip("\ufffd"))
        spoken += self._reader.finish(is_whole=reason is FinishReason.EOS)
        deltas = self._deltas(spoken)
        if not self._is_over():
            deltas = _joined([*deltas, *_words(self._saying.finish())])
        return deltas

    def _is_over(self) -> bool:
        return self._saying.stop is not None

    def _is_silent(self, token: int) -> bool:
        if token >= self._output_format.n_vocab or token in self._output_format.eos:
            return True
        if self._is_raw:
            return token in self._output_format.special
        return token in self._output_format.hidden and not self._reader.is_in_call

    def _prime(self, before: tuple[int, ...]) -> str:
        """Feed the prompt's end; returns its white space held back."""
        whole = self._output_format.tokenizer.detokenizer
        for token in before:
            whole.add_token(token)
            self._letters.add_token(token)
        emitted: str = self._letters.last_segment
        whole.finalize()
        held: str = whole.text[len(emitted) :]
        return held if held.isspace() else ""

    def _new_text(self) -> str:
        text: str = self._letters.last_segment
        if text and self._known:
            # A detokenizer holds a last space back, until it knows the next token.
            text, self._known = text.removeprefix(self._known), ""
        return text

    def _deltas(self, spoken: Iterable[Spoken]) -> list[Delta]:
        deltas: list[Delta] = []
        for stretch in spoken:
            deltas += self._delta(stretch)
            if self._is_over():
                break
        return _joined(deltas)

    def _delta(self, stretch: Spoken) -> list[Delta]:
        match stretch:
            case Thought():
                thought = self._thoughts.push(stretch.text)
                return [ReasoningPiece(thought)] if thought else []
            case Content():
                deltas = _words(self._saying.push(stretch.text))
                return [*deltas, StopMatched(self.stop)] if self.stop is not None else deltas
            case Break():
                self._thoughts.finish()
                return _words(self._saying.leave())
            case Calls():
                return self._calls(stretch)
            case Unparsed():
                self.n_unparsed += 1
                name = self._output_format.description.name
                log.warning("a tool call is no %s and stays text: %.200r", name, stretch.raw)
                return [TextPiece(stretch.raw, is_unparsed=True)]
            case Cut():
                self.is_cut = True
        return []

    def _calls(self, stretch: Calls) -> list[Delta]:
        self.n_calls += len(stretch.calls)
        named = tuple(self._named(call) for call in stretch.calls)
        return [
            *(ToolCallPiece(call) for call in named[:-1]),
            ToolCallPiece(named[-1], self._block(named, stretch)),
        ]

    def _block(self, calls: tuple[ToolCall, ...], stretch: Calls) -> Block | None:
        """Tokens of the last text; None where tokens cross its edges."""
        sampled, self._tokens = self._tokens, []
        pieces = [self._output_format.pieces.of(token) for token in sampled]
        raw = stretch.raw.encode()
        start = b"".join(pieces).rfind(raw)
        edges = list(accumulate(map(len, pieces), initial=0))
        if start not in edges or start + len(raw) not in edges:
            return None
        # A token without text of its own belongs to the token that follows.
        first, stop = edges.index(start), edges.index(start + len(raw))
        is_closed = stretch.is_closed and bool(self._output_format.model_markers.call_end)
        return Block(calls, tuple(sampled[first:stop]), is_closed)

    def _named(self, call: ToolCall) -> ToolCall:
        """Call with an id that is unique in this answer."""
        if not call.id or call.id in self._ids:
            call = msgspec.structs.replace(call, id=self._make_id())
        self._ids.add(call.id)
        return call


def _words(text: str) -> list[Delta]:
    return [TextPiece(text)] if text else []


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbors of one kind as one."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        match last, delta:
            case TextPiece(text=a, is_unparsed=False), TextPiece(text=b, is_unparsed=False):
                joined[-1] = TextPiece(a + b)
            case ReasoningPiece(text=a), ReasoningPiece(text=b):
                joined[-1] = ReasoningPiece(a + b)
            case _:
                joined.append(delta)
    return joined


class StopStringFilter:
    """The answer itself. `stop` is the stop word that was met.

    `is_raw` text is not trimmed; `is_open` speech goes on in the middle of a line.
    """

    def __init__(self, stops: tuple[str, ...], *, is_raw: bool, is_open: bool) -> None:
        self.stop: str | None = None
        self._words = tuple(word for word in stops if word)
        self._state = _stop_state(self._words)
        self._edges = None if is_raw else WhitespaceTrimmer(is_open=is_open)

    def push(self, text: str) -> str:
        """Text to emit now, without stop strings or their beginnings."""
        self._state, segments = TextStateMachine.split(self._state, text)
        emitted = self._trimmed(segments[0][1])
        if len(segments) > 1:
            self.stop = self._words[int(segments[1][0])]
            emitted += self._rest()
        return emitted

    def leave(self) -> str:
        """Return held-back text without trailing white space, as something else follows."""
        emitted = self._trimmed(self._flushed())
        self._rest()
        return emitted

    def finish(self) -> str:
        """Return held-back text; nothing follows."""
        return self._trimmed(self._flushed()) + self._rest()

    def _flushed(self) -> str:
        self._state, held, _ = TextStateMachine.flush(self._state)
        return str(held)

    def _trimmed(self, text: str) -> str:
        return text if self._edges is None else self._edges.push(text)

    def _rest(self) -> str:
        return "" if self._edges is None else self._edges.finish()


def _stop_state(words: tuple[str, ...]) -> Any:
    """State that leaves NORMAL for the number of the first complete word."""
    edges = [(word, str(at)) for at, word in enumerate(words)]
    machine = TextStateMachine({NORMAL: edges, **{name: [] for _, name in edges}})
    return machine.make_state(NORMAL)
