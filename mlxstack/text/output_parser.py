"""The tokens of one answer to thoughts, words and tool calls, on mlx-lm's text state machine."""

from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
from mlx_lm.generate import TextStateMachine
from msgspec import Struct

from mlxstack.core.conversation import ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.text.output_format import NORMAL, REASONING, TOOL, OutputFormat, ParseOptions
from mlxstack.text.parsers import is_inside_argument
from mlxstack.text.stop_strings import StopStringFilter, WhitespaceTrimmer
from mlxstack.text.tool_call_parser import parse_calls, tool_schemas
from mlxstack.text.tool_call_replay import Block

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
    """A stretch of the answer. `is_unparsed`: a tool call that made no sense, markers included."""

    text: str
    is_unparsed: bool = False


class ToolCallPiece(Struct, frozen=True):
    """A complete tool call. The last one of a block has the block, if its tokens are known."""

    call: ToolCall
    block: Block | None = None


class StopMatched(Struct, frozen=True):
    """A stop word of the request is complete; it and what follows are not said."""

    word: str


Delta = ReasoningPiece | TextPiece | ToolCallPiece | StopMatched


class OutputParser:
    """Hears one answer, token by token; not to be shared by threads.

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
        self._model_markers = output_format.model_markers
        self._is_raw = parse_options.is_raw
        self._make_id = make_id
        self._ids: set[str] = set()
        self._state = output_format.first_state(parse_options)
        self._at: str = self._state[0]
        is_open = bool(parse_options.before)
        self._saying = StopStringFilter(
            parse_options.stops, is_raw=parse_options.is_raw, is_open=is_open
        )
        self._thoughts = WhitespaceTrimmer(is_open=is_open)
        self._call = ""
        # The place of the first closing mark in the call that was read as text of an argument.
        self._first_end: int | None = None
        self._has_inner_ends = bool(output_format.model_markers.call_end)
        self._tokens: list[int] = []
        self._shapes = tool_schemas(parse_options.tools)
        self._letters = output_format.tokenizer.detokenizer
        self._known = self._prime(parse_options.before)

    @property
    def stop(self) -> str | None:
        """The stop word that was met; the answer is over."""
        return self._saying.stop

    def push(self, token: int) -> list[Delta]:
        """What becomes certain with this token."""
        if self._is_over():
            return []
        self._tokens.append(token)
        if self._is_silent(token):
            return []
        self._letters.add_token(token)
        was_reasoning = self._at == REASONING
        deltas = self._hear(self._new_text())
        self.n_reasoning += was_reasoning or self._at == REASONING
        return deltas

    def finish(self, reason: FinishReason) -> list[Delta]:
        """What was held back, once no token follows."""
        if self._is_over():
            return []
        self._letters.finalize()
        deltas = self._hear(self._new_text().rstrip("\ufffd"))
        return _joined([*deltas, *self._flush(reason)])

    def _flush(self, reason: FinishReason) -> list[Delta]:
        if self._is_over():
            return []
        self._state, rest, at = TextStateMachine.flush(self._state)
        deltas = self._place(at, rest)
        if at != TOOL:
            return deltas if self._is_over() else deltas + _words(self._saying.finish())
        if reason is FinishReason.EOS and self._is_misread():
            return [*deltas, *self._restart(""), *self._flush(reason)]
        return deltas + self._end_call(reason)

    def _is_over(self) -> bool:
        return self._saying.stop is not None

    def _is_silent(self, token: int) -> bool:
        if token >= self._output_format.n_vocab or token in self._output_format.eos:
            return True
        if self._is_raw:
            return token in self._output_format.special
        return token in self._output_format.hidden and self._at != TOOL

    def _prime(self, before: tuple[int, ...]) -> str:
        """Feed the end of the prompt; return the white space of it that is still held back."""
        whole = self._output_format.tokenizer.detokenizer
        for token in before:
            whole.add_token(token)
            self._letters.add_token(token)
        told: str = self._letters.last_segment
        whole.finalize()
        held: str = whole.text[len(told) :]
        return held if held.isspace() else ""

    def _new_text(self) -> str:
        text: str = self._letters.last_segment
        if text and self._known:
            # A detokenizer holds a last space back, until it knows the next token.
            text, self._known = text.removeprefix(self._known), ""
        return text

    def _hear(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        whole = self._state[3] + text
        self._state, segments = TextStateMachine.split(self._state, text)
        if self._at == TOOL and len(segments) > 1:
            n, end = len(segments[0][1]), self._model_markers.call_end
            said, rest = whole[:n], whole[n + len(end) :]
            if self._has_inner_ends and self._is_in_argument(said):
                return self._go_on(said, rest)
            self._call += said
            if self._is_misread():
                self._call += end
                return self._restart(rest)
            segments[0] = (TOOL, "")
        for at, said in segments:
            deltas += self._place(at, said)
            if self._is_over():
                break
        return _joined(deltas)

    def _place(self, at: str, text: str) -> list[Delta]:
        """Text of one state, after what the change to that state brings to an end."""
        deltas = self._leave() if at != self._at else []
        self._at = at
        if at == TOOL:
            self._call += text
        elif at == REASONING:
            thought = self._thoughts.push(text)
            deltas += [ReasoningPiece(thought)] if thought else []
        elif at == NORMAL:
            deltas += _words(self._saying.push(text))
            deltas += [StopMatched(self.stop)] if self.stop is not None else []
        return deltas

    def _leave(self) -> list[Delta]:
        """The end of a stretch; its trailing white space belongs to the template."""
        if self._at == TOOL:
            return self._close_call(self._model_markers.call_end)
        if self._at == NORMAL:
            return _words(self._saying.leave())
        self._thoughts.finish()
        return []

    def _is_in_argument(self, said: str) -> bool:
        return is_inside_argument(self._model_markers.format, self._call + said)

    def _go_on(self, said: str, rest: str) -> list[Delta]:
        """The closing mark after `said` is text of an argument; the call goes on with `rest`."""
        self._call += said
        if self._first_end is None:
            self._first_end = len(self._call)
        self._call += self._model_markers.call_end
        self._state = self._model_markers.with_tools.make_state(TOOL)
        return self._hear(rest)

    def _is_misread(self) -> bool:
        """Whether a closing mark that was read as text leaves no call."""
        return self._first_end is not None and not self._parsed()

    def _restart(self, rest: str) -> list[Delta]:
        """Close the call at its first closing mark after all, and hear what follows again."""
        text, at, end = self._call + rest, self._first_end or 0, self._model_markers.call_end
        self._call, self._has_inner_ends = text[:at], False
        deltas = self._close_call(end)
        self._state, self._at = self._model_markers.with_tools.make_state(NORMAL), NORMAL
        return deltas + self._hear(text[at + len(end) :])

    def _end_call(self, reason: FinishReason) -> list[Delta]:
        """A call that the end of the answer closes, or cuts (A-23u)."""
        is_whole = reason is FinishReason.EOS
        if is_whole or (not self._model_markers.call_end and self._parsed()):
            return self._close_call("")
        self._call, self._first_end, self.is_cut = "", None, True
        return []

    def _close_call(self, end: str) -> list[Delta]:
        """The complete call, or its text if it makes no sense (A-24)."""
        raw, calls = self._call, self._parsed()
        self._call, self._first_end = "", None
        self.n_calls += len(calls)
        if not calls:
            self.n_unparsed += 1
            return [TextPiece(f"{self._model_markers.call_start}{raw}{end}", is_unparsed=True)]
        named = tuple(self._named(call) for call in calls)
        block = self._block(
            named, f"{self._model_markers.call_start}{raw}{end}", is_closed=bool(end)
        )
        return [*(ToolCallPiece(call) for call in named[:-1]), ToolCallPiece(named[-1], block)]

    def _block(self, calls: tuple[ToolCall, ...], said: str, *, is_closed: bool) -> Block | None:
        """The tokens of what was `said` last; None if a token reaches over an edge of it."""
        sampled, self._tokens = self._tokens, []
        pieces = [self._output_format.pieces.of(token) for token in sampled]
        text, wanted = b"".join(pieces), said.encode()
        start = text.rfind(wanted)
        end = start + len(wanted)
        if start < 0:
            return None
        if header := self._model_markers.call_header.encode():
            start = text.rfind(header, 0, start)
            start = 0 if start < 0 else start + len(header)
        edges = list(accumulate(map(len, pieces), initial=0))
        if start not in edges or end not in edges:
            return None
        # A token without text of its own belongs to what it precedes.
        first, stop = edges.index(start), edges.index(end)
        return Block(calls, tuple(sampled[first:stop]), is_closed)

    def _parsed(self) -> tuple[ToolCall, ...]:
        return parse_calls(self._model_markers.parser, self._call, self._shapes)

    def _named(self, call: ToolCall) -> ToolCall:
        """With an id that no other call of this answer has."""
        if not call.id or call.id in self._ids:
            call = msgspec.structs.replace(call, id=self._make_id())
        self._ids.add(call.id)
        return call


def _words(text: str) -> list[Delta]:
    return [TextPiece(text)] if text else []


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
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
