"""Splits answer text into reasoning, content and tool calls."""

import re
from collections.abc import Generator, Iterable
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.response_parts import ContentPart, ReasoningPart, ToolCallStarted
from mlxstack.features.formats.call_bodies import ReadCalls
from mlxstack.features.formats.call_reader import CallReader
from mlxstack.features.formats.call_writer import CallEvent
from mlxstack.features.formats.repairs import ELEMENTS, MARKS
from mlxstack.features.formats.syntax import (
    Channels,
    DerivedFormat,
    ParsedMessage,
    ReasoningMarks,
    first_mark,
    is_mark,
)
from mlxstack.features.formats.text_feed import (
    FENCE,
    FoundMark,
    MarkSet,
    Reading,
    TextFeed,
    WhitespaceTrimmer,
)

MAX_HEADER = 300
"""The most characters of a channel header."""

_BEGUN_HEADER = re.compile(r"(?s)\s*(?:\S+\s+){0,2}\S*(?:(?:<[|]|to=).*)?")
"""A header, which has a mark or recipient in its first three words if it has more."""

CODE_MARK = "<|python_tag|>"
"""Mark of code in Llama's answers, which may stand before a bare call too."""

CODE_WORD = "tool_"
"""Beginning of the language of a fence that holds calls alone."""

MIN_MARK = 2
"""Least characters of the beginning of a mark."""

FOREIGN_MARKS = frozenset(row.opens for row in MARKS)
UNMARKED = ("{", "[", FENCE, *FOREIGN_MARKS, *ELEMENTS)
"""Beginnings of calls without the marks of their format."""

MAX_IN_VAIN = 64
"""Maximum calls searched for up to the end of a text."""


class Break(Struct, frozen=True):
    """End of a stretch, with white space of the template around."""


class Calls(Struct, frozen=True):
    """Complete calls, told before, and their text with marks.

    `is_closed`: including the last mark.
    """

    calls: tuple[ToolCall, ...]
    raw: str
    is_closed: bool


class Unparsed(Struct, frozen=True):
    """The text of a call that makes no sense, marks included."""

    raw: str


class Cut(Struct, frozen=True):
    """A call that the end of the text cut."""


Spoken = ReasoningPart | ContentPart | Break | CallEvent | Calls | Unparsed | Cut


class AnswerReader:
    """Reads an answer as its text arrives, however it is cut.

    Without `tools` the marks of calls are text. `is_open`: the answer goes on in the middle of
    its content. `is_reasoning` and `is_in_call` say where the text stands.
    """

    def __init__(
        self,
        output_format: DerivedFormat,
        tools: Iterable[Tool] = (),
        *,
        is_in_thinking: bool = False,
        is_open: bool = False,
    ) -> None:
        has_thoughts = output_format.reasoning is not None or output_format.channels is not None
        self.is_reasoning = is_in_thinking and has_thoughts
        self.is_in_call = False
        self._format = output_format
        self._feed = TextFeed()
        self._spoken: list[Spoken] = []
        self._n_vain = 0
        tools = tuple(tools)
        syntax = output_format.calls
        self._calls = None
        if syntax is not None and tools:
            self._calls = CallReader(syntax, self._feed, tools, self._on_call)
        self._has_said = is_open
        self._has_thought = False
        self._begins_line = not is_open
        self._is_after_call = False
        self._reasoning = output_format.reasoning or ReasoningMarks("", "")
        self._prefix = self._reasoning.prefix
        self._content_marks = MarkSet(self._marks(is_reasoning=False))
        self._thought_marks = MarkSet(self._marks(is_reasoning=True))
        self._steps = self._read(is_open=is_open)
        next(self._steps, None)

    def feed(self, text: str) -> list[Spoken]:
        """The stretches that become certain with this text."""
        self._feed.text += text
        return self._go_on()

    def finish(self, *, is_whole: bool = True) -> list[Spoken]:
        """Read the rest; an incomplete answer has incomplete calls."""
        self._feed.is_final = True
        self._feed.is_cut = not is_whole
        return self._go_on()

    def _go_on(self) -> list[Spoken]:
        if self._calls is not None:
            self._calls.advance()
        next(self._steps, None)
        stretches = self._spoken
        self._spoken = []
        return stretches

    def _marks(self, *, is_reasoning: bool) -> list[str]:
        calls = self._calls
        literals = [*self._structure, self._reasoning.opens]
        if calls is not None:
            literals += calls.strict
        if calls is not None and not is_reasoning:
            literals += [*calls.lenient, *UNMARKED, *calls.closings]
        return [first_mark(mark) for mark in literals]

    def _read(self, *, is_open: bool) -> Generator[None, None, None]:
        channels = self._format.channels
        is_inside = is_open or self.is_reasoning
        if channels is None and not is_inside:
            yield from self._bare_calls()
        while self._feed.text or not self._feed.is_final:
            if not self._feed.text:
                yield
            elif channels is not None:
                reading = self._message(channels) if is_inside else self._header(channels)
                is_inside = yield from reading
            elif self.is_reasoning:
                yield from self._think()
            else:
                yield from self._talk()

    def _say(self, marks: MarkSet) -> Reading[FoundMark | None]:
        """Emit the text up to the next mark, where the feed restarts."""
        feed = self._feed
        while True:
            mark = marks.search(feed.text, 0, is_final=feed.is_final)
            is_whole = feed.is_final and not feed.is_cut
            end = len(feed.text) if is_whole else marks.hold(feed.text, 0)
            if feed.is_final and len(feed.text) - end < MIN_MARK:
                end = len(feed.text)
            self._emit(feed.text[: mark.start if mark else end])
            if mark is None and feed.is_final:
                # A mark that the end of a cut answer began is no text.
                end = len(feed.text)
            feed.drop(mark.start if mark else end)
            if mark is not None or feed.is_final:
                return mark
            yield

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self.is_reasoning and self._prefix:
            if text.isspace():
                return
            text = self._prefix + text
            self._prefix = ""
        self._spoken.append(ReasoningPart(text) if self.is_reasoning else ContentPart(text))
        if not text.isspace():
            self._has_thought = self._has_thought or self.is_reasoning
            self._has_said = self._has_said or not self.is_reasoning
            self._is_after_call = False
        line = text.rpartition("\n")
        self._begins_line = not line[2].strip() and bool(line[1] or self._begins_line)

    def _talk(self) -> Reading[None]:
        """Content up to what ends it: the first meaning of a mark counts."""
        mark = yield from self._say(self._content_marks)
        if mark is None:
            return
        meanings = (
            self._opens_thought,
            self._calls_at,
            self._unmarked_calls,
            self._drops,
            self._is_doubled,
            self._is_unreadable,
        )
        for meaning in meanings:
            if (yield from meaning(mark.text)):
                return
        self._emit(mark.text)
        self._feed.drop(len(mark.text))

    def _opens_thought(self, mark: str) -> Reading[bool]:
        """Whether a thought opens here; then it has."""
        opened = yield from self._match((self._reasoning.opens,), mark)
        if not opened:
            return False
        self._spoken.append(Break())
        self._feed.drop(opened)
        self.is_reasoning = True
        self._has_thought = False
        return True

    def _calls_at(self, mark: str) -> Reading[bool]:
        """Whether calls begin at a mark of theirs; then they are told."""
        if self._calls is None or mark not in self._calls.strict | self._calls.lenient:
            return False
        self.is_in_call = True
        section = yield from self._section(0, is_lenient=True)
        if section is not None:
            self._finish_calls(section)
        self.is_in_call = False
        return section is not None

    def _drops(self, mark: str) -> Reading[bool]:
        """Whether a mark of the structure stands here; then it is dropped."""
        end = yield from self._match(self._structure, mark)
        if not end and self._is_after_call and self._calls and mark in self._calls.closings:
            end = len(mark)
        if not end:
            return False
        self._feed.drop(end)
        if not self._has_said:
            yield from self._bare_calls()
        return True

    def _is_own(self, mark: str) -> bool:
        """Whether a mark opens nothing but calls."""
        literals = (self._reasoning.opens, *self._structure)
        is_shared = any(first_mark(literal) == mark for literal in literals)
        return self._calls is not None and mark in self._calls.strict and not is_shared

    def _is_doubled(self, mark: str) -> Reading[bool]:
        """Whether a mark stands twice before calls; then the first one is dropped."""
        if not self._is_own(mark):
            return False
        again = yield from self._feed.space(len(mark))
        if not (yield from self._feed.starts(mark, again)):
            return False
        section = yield from self._section(again, is_quiet=True)
        if section is None or not self._knows(section):
            return False
        self._feed.drop(again)
        return True

    def _is_unreadable(self, mark: str) -> Reading[bool]:
        """Whether a call stands here that makes no sense, or is cut."""
        calls = self._calls
        if calls is None or mark not in calls.strict | calls.lenient:
            return False
        if self._is_own(mark) and not (yield from calls.begins_prose(mark)):
            end = yield from calls.unreadable(0)
            is_last = (yield from self._feed.space(end)) == len(self._feed.text)
            is_empty = is_last and self._has_said and calls.is_empty(self._feed.text[:end])
            self._unparsed(end, is_empty=is_empty)
            return True
        if self._is_cut_call(0):
            self._unparsed(len(self._feed.text))
            return True
        return False

    def _unmarked_calls(self, mark: str) -> Reading[bool]:
        """Whether calls without marks of the format end the answer."""
        if mark not in UNMARKED or self._calls is None:
            return False
        if not (self._begins_line or self._calls.is_bare or mark in FOREIGN_MARKS):
            return False
        return (yield from self._last_calls())

    def _last_calls(self) -> Reading[bool]:
        """Whether calls without marks of the format are all that follows."""
        assert self._calls is not None
        if self._n_vain > MAX_IN_VAIN:
            return False
        sections: list[ReadCalls] = []
        end = 0
        while end < len(self._feed.text):
            start = yield from self._feed.space(end)
            inside, closing = yield from self._opened(start)
            section = yield from self._calls.unmarked(inside, is_marked=closing not in ("", FENCE))
            if section is None:
                break
            sections.append(section)
            closed = yield from self._feed.optional(closing, section.end)
            end = yield from self._after_turn(closed)
        is_last = self._end_answer(sections, end)
        self._n_vain += bool(sections) and not is_last
        return is_last

    def _end_answer(self, sections: list[ReadCalls], end: int) -> bool:
        """Whether sections that were read quietly end the answer; then they are told."""
        if not sections or end < len(self._feed.text) or self._feed.is_cut:
            return False
        self.is_reasoning = False
        self._finish_calls(replace(self._told(sections), end=end))
        return True

    def _opened(self, start: int) -> Reading[tuple[int, str]]:
        """Position after a fence or foreign mark, and its closing mark."""
        inside = yield from self._feed.fence(start)
        if inside >= 0:
            is_code = self._feed.text.startswith(f"{FENCE}{CODE_WORD}", start)
            return inside, f"\n{FENCE}" if is_code else FENCE
        for row in MARKS:
            if (yield from self._feed.starts(row.opens, start)):
                return start + len(row.opens), row.closes or " "
        return start, ""

    def _is_cut_call(self, start: int) -> bool:
        """Whether the answer was cut inside a call."""
        calls = self._calls
        feed = self._feed
        return calls is not None and feed.is_cut and calls.is_named(feed.text[start:])

    @property
    def _structure(self) -> tuple[str, ...]:
        """The literals of content that are dropped."""
        form = self._format
        return (self._reasoning.closes, *form.wrappers, *form.turn_ends, *form.strays)

    def _match(self, literals: Iterable[str], mark: str) -> Reading[int]:
        """End of the first matching literal at this mark; 0 without one."""
        for literal in literals:
            if first_mark(literal) == mark:
                end = yield from self._feed.literal(literal, 0)
                if end is not None:
                    return end
        return 0

    def _think(self) -> Reading[None]:
        """Read a thought; only calls that end the answer count."""
        mark = yield from self._say(self._thought_marks)
        marks = self._reasoning
        if mark is None:
            return
        # An answer may begin without the end of its thoughts.
        end = yield from self._match((marks.closes, *self._format.wrappers[:1]), mark.text)
        if end:
            self._feed.drop(end)
            self.is_reasoning = False
            self._begins_line = True
            self._spoken.append(Break())
            yield from self._bare_calls()
        elif not self._has_thought and (
            again := (yield from self._match((marks.opens,), mark.text))
        ):
            # The prompt opened the thought already.
            self._feed.drop(again)
        elif self._calls is not None and mark.text in self._calls.strict:
            yield from self._quoted_call(mark.text, marks.closes)
        else:
            self._emit(mark.text)
            self._feed.drop(len(mark.text))

    def _quoted_call(self, mark: str, closes: str) -> Reading[None]:
        """Calls that begin a thought or end the answer count."""
        sections: list[ReadCalls] = []
        end = 0
        while end < len(self._feed.text):
            section = yield from self._section(end, is_quiet=True)
            if section is None:
                break
            sections.append(section)
            if not self._has_thought and section.is_closed and self._knows(section):
                self.is_reasoning = False
                self._finish_calls(self._told(sections))
                return
            end = yield from self._after_turn(section.end)
        end = yield from self._after_turn((yield from self._feed.optional(closes, end)))
        if self._end_answer(sections, end):
            return
        self._n_vain += len(sections) > 1
        self._emit(mark)
        self._feed.drop(len(mark))

    def _knows(self, section: ReadCalls) -> bool:
        """Whether a section has calls, all of offered tools."""
        assert self._calls is not None
        return bool(section.calls) and self._calls.knows(section)

    def _told(self, sections: list[ReadCalls]) -> ReadCalls:
        """Sections that were read quietly as one, whose calls are told."""
        assert self._calls is not None
        calls = tuple(call for section in sections for call in section.calls)
        for call in calls:
            self._calls.emit(call)
        return replace(sections[-1], calls=calls)

    def _after_turn(self, offset: int) -> Reading[int]:
        """Position after the marks that end a turn, or calls."""
        assert self._calls is not None
        ends = (*self._format.wrappers[1:], *self._format.turn_ends, *self._format.strays)
        while True:
            offset = start = yield from self._feed.space(offset)
            for literal in (*ends, *self._calls.closings, *(row.closes for row in MARKS)):
                offset = yield from self._feed.passed(literal, offset)
            if offset == start:
                return offset

    def _section(
        self, offset: int, *, is_lenient: bool = False, is_quiet: bool = False
    ) -> Reading[ReadCalls | None]:
        """Calls at a position; none after many failed searches."""
        assert self._calls is not None
        if self._n_vain > MAX_IN_VAIN:
            return None
        section = yield from self._calls.section(offset, is_lenient=is_lenient, is_quiet=is_quiet)
        self._n_vain += section is None and self._feed.is_final
        return section

    def _on_call(self, event: CallEvent) -> None:
        if isinstance(event, ToolCallStarted):
            self._spoken.append(Break())
        self._spoken.append(event)

    def _finish_calls(self, section: ReadCalls) -> None:
        """End a section, whose calls were told."""
        assert self._calls is not None
        end = section.end
        text = self._feed.text
        is_space = not section.is_closed and self._feed.is_final and text[end:].isspace()
        if is_space or (self._feed.is_cut and self._calls.begins_end(text[end:])):
            end = len(text)
        self._spoken.append(Break())
        if section.is_cut:
            self._spoken.append(Cut())
        if section.calls:
            self._spoken.append(Calls(section.calls, text[:end], section.is_closed))
            self._is_after_call = True
        self._feed.drop(end)

    def _unparsed(self, end: int, *, is_empty: bool = False) -> None:
        """Tell the text of a call, unless it `is_empty`."""
        raw = self._feed.text[:end]
        self._feed.drop(end)
        if self._feed.is_cut and not self._feed.text:
            self._spoken += [Break(), Cut()]
            return
        if not is_empty:
            self._spoken.append(Unparsed(raw))

    def _bare_calls(self) -> Reading[None]:
        """Calls that no mark announces may begin the content."""
        if self._calls is None or not self._calls.is_bare:
            return
        start = yield from self._feed.space(0)
        self.is_in_call = True
        start = yield from self._feed.space((yield from self._feed.passed(CODE_MARK, start)))
        section = yield from self._calls.section(start)
        if section is not None:
            end = yield from self._after_turn(section.end)
            self._feed.drop(start)
            self._finish_calls(replace(section, end=end - start))
        elif not (yield from self._last_calls()) and self._is_cut_call(start):
            self._unparsed(len(self._feed.text))
        self.is_in_call = False

    def _message(self, channels: Channels) -> Reading[bool]:
        """Thought or content up to its end; a header follows."""
        mark = yield from self._say(MarkSet(channels.stops))
        self._spoken.append(Break())
        self.is_reasoning = False
        if mark is not None and mark.text in channels.ends:
            self._feed.drop(len(mark.text))
        return False

    def _header(self, channels: Channels) -> Reading[bool]:
        """Whether speech follows a header; a call's message is read."""
        feed = self._feed
        within = _BEGUN_HEADER if is_mark(channels.message) else None
        mark = yield from feed.find(MarkSet([channels.message]), 0, within)
        header = feed.text[: mark.start]
        if not mark.text or len(header) > MAX_HEADER or (within and not within.fullmatch(header)):
            return self._headless(channels)
        call = re.search(channels.call, header)
        if call is not None and self._calls is not None and self._is_call(call, self._calls):
            self.is_in_call = True
            yield from self._channel_call(channels, call["name"], mark.end)
            self.is_in_call = False
            return False
        self.is_reasoning = re.search(channels.reasoning, header) is not None
        feed.drop(mark.end)
        return True

    def _is_call(self, header: re.Match[str], calls: CallReader) -> bool:
        """Whether the recipient of a message is a tool."""
        is_plain = "space" in header.groupdict() and not header["space"]
        return not is_plain or calls.types.has(header["name"])

    def _headless(self, channels: Channels) -> bool:
        """Whether text without a header is content; it may only begin one."""
        text = self._feed.text
        self.is_reasoning = False
        is_cut = self._feed.is_cut and re.search(channels.call, text) is not None
        if not is_cut and not re.match(rf"\s*(?:<\||to=|{re.escape(channels.starts)})", text):
            return True
        self._feed.drop(len(text))
        self._spoken += [Cut()] if is_cut else []
        return False

    def _channel_call(self, channels: Channels, name: str, offset: int) -> Reading[None]:
        """Call in a message: JSON arguments, or its own section."""
        feed = self._feed
        assert self._calls is not None
        if self._calls.has_sections:
            section = yield from self._calls.section(offset)
        else:
            section = yield from self._calls.message(name, offset, channels.stops)
        end = offset if section is None else section.end
        stop = yield from feed.find(MarkSet(channels.stops), end)
        start = 0
        if feed.text.startswith(channels.starts):
            start = len(channels.starts)
        feed.drop(start)
        if section is not None and (section.calls or section.is_cut):
            is_closed = bool(stop.text)
            self._finish_calls(replace(section, end=stop.start - start, is_closed=is_closed))
        else:
            self._unparsed(stop.start - start)
        if stop.text in channels.ends:
            feed.drop(len(stop.text))


def read_answer(
    output_format: DerivedFormat,
    raw: str,
    tools: Iterable[Tool],
    *,
    is_in_thinking: bool = False,
    is_open: bool = False,
) -> ParsedMessage:
    """The message that a raw answer means, special tokens spelled out."""
    reader = AnswerReader(output_format, tools, is_in_thinking=is_in_thinking, is_open=is_open)
    content = WhitespaceTrimmer(is_open=is_open)
    thoughts = WhitespaceTrimmer(is_open=False)
    text = ""
    thought = ""
    calls = list[ToolCall]()
    n_unparsed = 0
    for stretch in [*reader.feed(raw), *reader.finish()]:
        match stretch:
            case ContentPart():
                text += content.push(stretch.text)
            case ReasoningPart():
                thought += thoughts.push(stretch.text)
            case Calls():
                calls += stretch.calls
            case Unparsed():
                text += content.push(stretch.raw)
                n_unparsed += 1
            case Break():
                content.finish()
                thoughts.finish()
    ids = count()
    for offset, call in enumerate(calls):
        if not call.id or any(call.id == earlier.id for earlier in calls[:offset]):
            calls[offset] = replace(call, id=f"call_{next(ids)}")
    return ParsedMessage(text + content.finish(), thought, tuple(calls), n_unparsed)
