"""Incremental parser of tool calls for a described syntax."""

import re
from collections.abc import Callable, Iterable
from functools import cached_property

from msgspec.structs import replace

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.features.formats.argument_values import ArgumentTypes
from mlxstack.features.formats.call_bodies import (
    MAX_HEAD,
    SEPARATORS,
    SLOT,
    BodyReader,
    CallContext,
    GemmaReader,
    NamedReader,
    PublishedReader,
    PythonReader,
    ReadCalls,
)
from mlxstack.features.formats.call_writer import CallEvent, CallWriter
from mlxstack.features.formats.checked_calls import UNREADABLE
from mlxstack.features.formats.json_calls import JsonReader
from mlxstack.features.formats.repairs import ELEMENTS, OBJECT, SYNTAXES
from mlxstack.features.formats.syntax import (
    CallBody,
    CallSyntax,
    GemmaBody,
    JsonBody,
    NamedBody,
    PublishedBody,
    PythonBody,
    TaggedBody,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.features.formats.tagged_calls import TaggedReader
from mlxstack.features.formats.text_feed import FENCE, Reading, TextFeed

READERS: dict[type[CallBody], type[BodyReader]] = {
    JsonBody: JsonReader,
    NamedBody: NamedReader,
    TaggedBody: TaggedReader,
    PythonBody: PythonReader,
    GemmaBody: GemmaReader,
    PublishedBody: PublishedReader,
}
"""Reader of each node."""

_NAMED = re.compile(r'[\[{].*?"name"\s*:\s*"([^"]+)"', re.DOTALL)
_BRACKETS = re.compile(r"[\s}\]]*")
_PROSE = re.compile(r"\s*+(?:\w++[,.;:!?]? ++){3}\w")
_BEGUN_PROSE = re.compile(r"\s*+(?:\w++[,.;:!?]? ++){0,2}+(?:\w++[,.;:!?]?)? *+")
_QUOTES = ("`", '"', "'", ")")
UNMARKED = frozenset({"type", "function", "arguments", "parameters", "tool_calls"})


class CallReader:
    """Reads calls from a feed, with argument types of the tools.

    `emit` gets the events of calls as they become certain.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        feed: TextFeed,
        tools: Iterable[Tool],
        emit: Callable[[CallEvent], None],
    ) -> None:
        tools = tuple(tools)
        self.types = ArgumentTypes(tools)
        self.strict = syntax.strict_marks
        self.lenient = set(syntax.body.heads[:1]) or syntax.trigger_marks - self.strict
        self.is_bare = syntax.is_bare
        self.has_sections = bool(syntax.section_opens)
        self._syntax = syntax
        self._feed = feed
        self._writer = CallWriter(feed, emit, self.types)
        self._context = CallContext(feed, self.types, tools, self._writer)
        self._body = READERS[type(syntax.body)](syntax, self._context)
        self.closings = self._body.outer_closings

    @cached_property
    def _objects(self) -> JsonReader:
        """Reader of objects, which any model may write."""
        body = self._syntax.body
        named = body if isinstance(body, JsonBody) and body.name else OBJECT
        return JsonReader(self._syntax, self._context, named)

    @cached_property
    def _others(self) -> list[BodyReader]:
        """Readers of the rows of `SYNTAXES`."""
        return [self._other(row.syntax) for row in SYNTAXES]

    def _other(self, syntax: CallSyntax) -> BodyReader:
        """Reader of the syntax of another model, maybe between the marks of this one."""
        if syntax.is_bare:
            syntax = replace(self._syntax, body=syntax.body)
        return READERS[type(syntax.body)](syntax, self._context)

    def advance(self) -> None:
        """Tell what the text now makes certain."""
        self._writer.advance()

    def section(
        self, offset: int, *, is_lenient: bool = False, is_quiet: bool = False
    ) -> Reading[ReadCalls | None]:
        """The calls that begin at a mark; None if there are none.

        They are told as they are read, unless `is_quiet`.
        """
        self._writer.is_quiet = is_quiet
        syntax = self._syntax
        feed = self._feed
        inside = yield from feed.literal(syntax.section_opens, offset)
        has_section = inside is not None and bool(syntax.section_opens.strip())
        end = offset if inside is None else inside
        calls: list[ToolCall] = []
        is_closed = True
        while True:
            read = yield from self._call(
                end, is_lenient=is_lenient and not calls, is_inside=has_section
            )
            if read is None:
                break
            read = self._told(read)
            calls += read.calls
            end = read.end
            is_closed = read.is_closed
            if read.is_cut:
                return ReadCalls(tuple(calls), end, is_closed=False, is_cut=True)
            if syntax.section_closes.strip():
                after = yield from feed.literal(syntax.section_closes, end)
                if after is not None:
                    return ReadCalls(tuple(calls), after)
            # Calls that nothing closes stand in a row; others are told one by one.
            is_row = has_section or not syntax.closes.strip() or not is_closed
            following = -1
            if is_row:
                following = yield from self._following(end)
            if following < 0:
                break
            end = following
        if has_section and not calls:
            # A section without calls says nothing.
            after = yield from feed.literal(syntax.section_closes, end)
            if after is None or not syntax.section_closes:
                return None
            return ReadCalls((), after)
        is_closed = is_closed and not (has_section and syntax.section_closes.strip())
        if calls:
            return ReadCalls(tuple(calls), end, is_closed)
        return None

    def unmarked(self, offset: int, *, is_marked: bool) -> Reading[ReadCalls | None]:
        """Calls of offered tools without marks of the format, read quietly.

        Without any marks they are objects, a list of Python calls, or tags.
        """
        self._writer.is_quiet = True
        self._writer.begin(offset)
        read = yield from self._tried(self._object(offset, is_marked=is_marked))
        if read is None:
            is_call = yield from self._begins_python(
                offset, may_be_plain=self._syntax.body.name_ends == "("
            )
            is_element = not is_call and (yield from self._feed.any_of(ELEMENTS, offset)) > offset
            if is_marked or is_call or is_element:
                read = yield from self._other_syntax(offset)
        if read is not None and self.knows(read):
            return self._told(read)
        return None

    def _begins_python(self, offset: int, *, may_be_plain: bool) -> Reading[bool]:
        """Whether Python calls of an offered tool begin here."""
        feed = self._feed
        is_list = yield from feed.starts("[", offset)
        if not (is_list or may_be_plain):
            return False
        start = (yield from feed.space(offset + 1)) if is_list else offset
        return (yield from self._body.tool_name(start, "(")) >= 0

    def _object(self, offset: int, *, is_marked: bool) -> Reading[ReadCalls | None]:
        """Calls of objects, which name their arguments unless marks are around them."""
        body = self._objects.body
        names = {body.name[-1], "name"}
        keys = names | {path[0] for path in (body.arguments, body.id, body.name) if path}
        if not (yield from self._objects.begins_object(offset, names, keys | UNMARKED)):
            return None
        read = yield from self._objects.objects(offset, is_certain=True)
        keys = {"arguments", "parameters", body.arguments[-1]}
        text = "" if read is None else self._feed.text[offset : read.end]
        is_named = is_marked or any(re.search(rf"[\"']{key}[\"']", text) for key in keys)
        if is_named:
            return read
        return None

    def knows(self, read: ReadCalls) -> bool:
        """Whether all calls are of offered tools."""
        return all(self.types.has(call.name) for call in read.calls)

    def begins_prose(self, mark: str) -> Reading[bool]:
        """Whether prose follows a mark, not even a malformed call."""
        feed = self._feed
        if feed.is_final:
            return False
        if not is_mark(mark):
            start = yield from feed.literal(_from(self._syntax.opens, mark), 0)
            return start is None or (yield from self._body.tool_name(start)) < 0
        if (yield from feed.any_of(_QUOTES, len(mark))) > len(mark):
            return not (yield from feed.starts(FENCE, len(mark)))
        while (begun := _BEGUN_PROSE.fullmatch(feed.text, len(mark))) and not feed.is_final:
            yield
        return begun is None and _PROSE.match(feed.text, len(mark)) is not None

    def is_empty(self, text: str) -> bool:
        """Whether a text is nothing but marks of calls."""
        return {*self.strict, *self.closings, "[]"}.issuperset(pieces(text))

    def begins_end(self, text: str) -> bool:
        """Whether a text begins a closing mark."""
        begun = text.strip()
        return bool(begun) and any(mark.startswith(begun) for mark in self._body.closing_marks)

    def is_named(self, text: str) -> bool:
        """Whether a text begins as an unmarked call of an offered tool."""
        head = text.lstrip()[:MAX_HEAD]
        name = _NAMED.match(head) if self._syntax.is_bare else None
        for mark in self.lenient:
            name = name or (SLOT.match(head, len(mark)) if head.startswith(mark) else None)
        return name is not None and self.types.has(name[name.lastindex or 0])

    def _told(self, read: ReadCalls) -> ReadCalls:
        """Write the other calls."""
        calls = tuple(replace(call, name=self.types.name(call.name)) for call in read.calls)
        for call in () if self._writer.is_quiet else calls[len(self._writer.calls) :]:
            self._writer.emit(call)
        return replace(read, calls=calls)

    def message(self, name: str, offset: int, ends: tuple[str, ...]) -> Reading[ReadCalls]:
        """Call whose arguments are a message, up to one of `ends`."""
        self._writer.is_quiet = False
        self._writer.begin(offset)
        reader = NamedReader(self._syntax, self._context)
        return self._told((yield from reader.message(name, offset, ends)))

    def emit(self, call: ToolCall) -> None:
        """Tell a call that was read quietly."""
        self._writer.emit(call)

    def unreadable(self, offset: int) -> Reading[int]:
        """End of an unparsable section: its closing mark, or the text's end."""
        mark = yield from self._feed.find(self._body.closings, offset)
        return (yield from self._feed.passed(self._syntax.section_closes, mark.end))

    def _following(self, end: int) -> Reading[int]:
        """Position of the call after another one; -1 without one."""
        feed = self._feed
        syntax = self._syntax
        offset = yield from feed.space((yield from feed.passed(syntax.between, end)))
        offset = yield from feed.space((yield from feed.any_of(SEPARATORS, offset)))
        opening = first_mark(syntax.opens) or first_mark(syntax.section_opens)
        if not opening and syntax.body.is_object:
            opening = "{"
        openings = [mark for mark in (opening, *self.lenient) if mark]
        if (yield from feed.any_of(openings, offset)) > offset:
            return offset
        return -1

    def _call(self, offset: int, *, is_lenient: bool, is_inside: bool) -> Reading[ReadCalls | None]:
        """Calls at a position, maybe inside of a section."""
        feed = self._feed
        syntax = self._syntax
        start = offset = yield from feed.space(offset)
        again = yield from feed.passed(syntax.section_opens, offset)
        inside = yield from feed.literal(syntax.opens, again)
        is_marked = inside is not None and not syntax.is_bare
        if inside is None and is_lenient:
            opening = next(iter(self.lenient), "")
            inside = yield from feed.literal(_from(syntax.opens, opening), start)
        if inside is None:
            inside = yield from self._without_name_space(start)
        if inside is None:
            return (yield from self._foreign(start, is_inside=is_inside))
        is_named = is_lenient and not is_marked and syntax.body.begins_with_name
        if is_named and (yield from self._body.tool_name(inside)) < 0:
            return None
        self._writer.begin(inside)
        body = yield from self._tried(self._body.read(inside))
        if body is None:
            return (yield from self._foreign(start, is_inside=is_inside))
        if body.is_cut:
            return body
        if is_lenient and not is_marked and not self.knows(body):
            return None
        end = yield from self._closing(body.end)
        is_closed = not syntax.closes.strip() or end > body.end
        return ReadCalls(body.calls, end, is_closed)

    def _without_name_space(self, offset: int) -> Reading[int | None]:
        """Position after a mark without its name space, or at a head."""
        body = self._syntax.body
        if body.heads:
            inside = yield from self._feed.any_of(body.heads[:1], offset)
            end = yield from self._body.tool_name(inside, body.name_ends)
            if inside > offset and end >= 0:
                return offset
            return None
        mark, *name_space = pieces(self._syntax.opens) or [""]
        if len(name_space) != 1 or not is_mark(mark) or not name_space[0].endswith("."):
            return None
        return (yield from self._feed.literal(mark, offset))

    def _closing(self, offset: int) -> Reading[int]:
        """Position after the closing mark, and after brackets too many."""
        feed = self._feed
        syntax = self._syntax
        end = yield from feed.optional(syntax.closes, offset)
        if end > offset or not syntax.body.ends_in_bracket:
            return end
        end = yield from feed.after(_BRACKETS, offset)
        if syntax.closes.strip():
            closed = yield from feed.literal(syntax.closes, end)
            if closed is None:
                return offset
            return closed
        if end == len(feed.text):
            return end
        closed = yield from feed.literal(syntax.section_closes, end)
        if closed in (None, end):
            return offset
        return end

    def _tried(self, reading: Reading[ReadCalls | None]) -> Reading[ReadCalls | None]:
        """Calls of a body; those already written count even if malformed."""
        try:
            body = yield from reading
        except UNREADABLE:
            body = None
        if body is None and self._writer.is_told:
            return (yield from self._broken())
        return body

    def _broken(self) -> Reading[ReadCalls]:
        """The calls that were told, up to a closing mark."""
        writer = self._writer
        mark = yield from self._feed.find(self._body.ends, writer.position)
        # A value between tags that reached the end may quote whole calls.
        closings = self._body.closing_marks if self._syntax.body.is_verbatim else ()
        is_quote = bool(closings) and mark.text not in closings
        is_last = is_quote or not self._feed.text[mark.end :].strip()
        if self._feed.is_cut and is_last and writer.is_open:
            writer.cut()
            end = len(self._feed.text)
            return ReadCalls(tuple(writer.calls), end, is_closed=False, is_cut=True)
        return ReadCalls(writer.close(mark.start), mark.start)

    def _foreign(self, offset: int, *, is_inside: bool) -> Reading[ReadCalls | None]:
        """Calls of another syntax between the marks of this one."""
        body = self._syntax.body
        mark = first_mark(self._syntax.opens)
        if not (mark or is_inside):
            return None
        inside = (yield from self._feed.literal(mark, offset)) if mark else None
        if inside is None and not is_inside:
            return None
        is_between = inside is not None
        if inside is None:
            inside = offset
        self._writer.begin(inside)
        read = None
        if not body.is_object:
            read = yield from self._tried(self._objects.objects(inside))
        if read is None:
            inside = yield from self._feed.any_of(body.heads[:1], inside)
            read = yield from self._other_syntax(inside)
        if read is None or read.is_cut:
            return read
        closing = ""
        if is_between:
            closing = next(reversed(pieces(self._syntax.closes)), "")
        end = yield from self._feed.optional(closing, read.end)
        return ReadCalls(read.calls, end, not closing or end > read.end)

    def _other_syntax(self, offset: int) -> Reading[ReadCalls | None]:
        """Calls of offered tools in the syntax of another model, read quietly."""
        was_quiet = self._writer.is_quiet
        self._writer.is_quiet = True
        try:
            offset = yield from self._feed.space(offset)
            for row, reader in zip(SYNTAXES, self._others, strict=True):
                self._writer.begin(offset)
                calls = yield from self._row(row.syntax, reader, offset)
                if calls is not None:
                    return calls
            return None
        finally:
            self._writer.is_quiet = was_quiet

    def _row(
        self, syntax: CallSyntax, reader: BodyReader, offset: int
    ) -> Reading[ReadCalls | None]:
        """Calls of offered tools in one syntax, one after the other."""
        if syntax.body.name_ends == "(" and not (
            yield from self._begins_python(offset, may_be_plain=True)
        ):
            return None
        feed = self._feed
        calls: tuple[ToolCall, ...] = ()
        end = offset
        while (start := (yield from feed.literal(syntax.opens, end))) is not None:
            read = yield from self._known(reader.read(start))
            if read is None:
                break
            calls = (*calls, *read.calls)
            end = yield from feed.optional(syntax.closes, read.end)
            if syntax.is_bare:
                break
        if calls:
            return ReadCalls(calls, end)
        return None

    def _known(self, reading: Reading[ReadCalls | None]) -> Reading[ReadCalls | None]:
        """Calls of offered tools alone."""
        try:
            read = yield from reading
        except UNREADABLE:
            return None
        if read is not None and read.calls and self.knows(read):
            return read
        return None


def _from(literal: str, piece: str) -> str:
    if piece and piece in literal:
        return literal[literal.rfind(piece) :]
    return literal
