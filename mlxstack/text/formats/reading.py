"""Parses a complete raw answer into a message."""

from collections.abc import Iterable
from itertools import count

from msgspec.structs import replace

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.text.formats.answer_reader import (
    AnswerReader,
    Break,
    Calls,
    Content,
    Thought,
    Unparsed,
)
from mlxstack.text.formats.description import DerivedFormat, ParsedMessage
from mlxstack.text.stop_strings import WhitespaceTrimmer


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
    content, thoughts = WhitespaceTrimmer(is_open=is_open), WhitespaceTrimmer(is_open=False)
    said, thought, calls, n_unparsed = "", "", list[ToolCall](), 0
    for one in [*reader.feed(raw), *reader.finish()]:
        match one:
            case Content():
                said += content.push(one.text)
            case Thought():
                thought += thoughts.push(one.text)
            case Calls():
                calls += one.calls
            case Unparsed():
                said += one.raw
                n_unparsed += 1
            case Break():
                content.finish()
                thoughts.finish()
    ids = (f"call_{n}" for n in count())
    known: set[str] = set()
    for at, call in enumerate(calls):
        if not call.id or call.id in known:
            calls[at] = replace(call, id=next(ids))
        known.add(calls[at].id)
    return ParsedMessage(said + content.finish(), thought, tuple(calls), n_unparsed)
