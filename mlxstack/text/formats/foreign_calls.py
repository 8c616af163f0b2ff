"""Reads calls in the syntaxes of other models."""

from msgspec.structs import replace

from mlxstack.core.conversation import ToolCall
from mlxstack.text.formats.call_parts import CallParts, ReadCalls
from mlxstack.text.formats.checked_calls import UNREADABLE
from mlxstack.text.formats.description import (
    ID,
    NAME,
    CallSyntax,
    JsonBody,
    NamedBody,
    PythonBody,
    TaggedBody,
)
from mlxstack.text.formats.python_calls import PythonCalls
from mlxstack.text.formats.tagged_calls import TaggedCalls
from mlxstack.text.formats.text_feed import Reading
from mlxstack.text.formats.value_calls import PYTHON_QUOTES, ValueCalls

FOREIGN = JsonBody((), ("name",), ("arguments",))
TAGGED = tuple(
    CallSyntax(
        TaggedBody((NAME, end), f"<parameter{sign}", f"{end}{space}", f"{space}</parameter>"),
        opens=f"<{tag}{sign}",
        closes=f"</{tag}>",
    )
    for tag, sign, end, space in (
        ("function", "=", ">", "\n"),
        ("invoke", ' name="', '">', ""),
        ("function", ' name="', '">', "\n"),
    )
)
MARKS = {
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<function_call>": "</function_call>",
    "<function_calls>": "</function_calls>",
    "<tools>": "</tools>",
    "[TOOL_CALLS]": "",
    "<|tool_call|>": "<|/tool_call|>",
    "<|python_start|>": "<|python_end|>",
    "<|python_tag|>": "",
    "functools": "",
}
"""Marks of calls that models write in place of their own."""

ELEMENTS = ("<function=", "<function", "<invoke")
"""Beginnings of calls that are tags."""

NAMED = (NamedBody((NAME, "[CALL_ID]", ID, "[ARGS]")), NamedBody((NAME,)))


class ForeignCalls:
    """Reads calls of offered tools, quietly, between the marks of a syntax."""

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._feed = parts.feed
        self._types = parts.types
        self._writer = parts.writer

    def read(self, at: int) -> Reading[ReadCalls | None]:
        """The calls at a position; None without any."""
        was_quiet = self._writer.is_quiet
        self._writer.is_quiet = True
        try:
            at = yield from self._feed.space(at)
            for reading in (self._elements(at), self._python_calls(at), self._names(at)):
                self._writer.begin(at)
                read = yield from self._tried(reading)
                if read is not None:
                    return read
            return None
        finally:
            self._writer.is_quiet = was_quiet

    def _tried(self, reading: Reading[ReadCalls | None]) -> Reading[ReadCalls | None]:
        """Calls of offered tools alone."""
        try:
            read = yield from reading
        except UNREADABLE:
            return None
        if read is None or not read.calls:
            return None
        if all(self._types.has(call.name) for call in read.calls):
            return read
        return None

    def _python_calls(self, at: int) -> Reading[ReadCalls | None]:
        """Python calls in a list, or one after the other."""
        feed = self._feed
        calls: tuple[ToolCall, ...] = ()
        is_list = yield from ValueCalls(self._parts).begins_call(at)
        start = at if is_list else (yield from self._parts.tool_name(at, "("))
        end = -1
        while start >= 0:
            end = yield from feed.balanced(start, PYTHON_QUOTES, ())
            if end < 0:
                return None
            body = PythonBody(is_list=False)
            calls = (*calls, *PythonCalls(body, self._types).parse(feed.text[at:end]))
            at = yield from feed.space(end)
            start = yield from self._parts.tool_name(at, "(")
        return ReadCalls(calls, end) if calls else None

    def _names(self, at: int) -> Reading[ReadCalls | None]:
        """A name, then the arguments as JSON."""
        for body in NAMED:
            parts = self._parts.of(replace(self._parts.syntax, body=body))
            read = yield from self._tried(ValueCalls(parts).named(at))
            if read is not None:
                return read
        return None

    def _elements(self, at: int) -> Reading[ReadCalls | None]:
        """Calls of tags, one after the other."""
        feed = self._feed
        for syntax in TAGGED:
            calls: tuple[ToolCall, ...] = ()
            end = at
            while (start := (yield from feed.literal(syntax.opens, end))) is not None:
                assert isinstance(syntax.body, TaggedBody)
                tagged = TaggedCalls(self._parts.of(syntax), syntax.body)
                read = yield from self._tried(tagged.read(start))
                if read is None:
                    break
                calls = (*calls, *read.calls)
                end = yield from feed.optional(syntax.closes, read.end)
            if calls:
                return ReadCalls(calls, end)
        return None
