"""Arguments of calls in pieces: soon after their tokens, and never taken back."""

import json
from itertools import count

import pytest

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.core.response_parts import AnswerPart, ArgumentsPart, ToolCallPart, ToolCallStarted
from mlxstack.features.formats.output_parser import OutputParser
from tests.features.formats.call_walks import ALL, walker_of
from tests.features.formats.test_derived_formats import TOOLS, said

MAX_TOKENS = 3
WORDS = " ".join(f"w{n:02}" for n in range(30))


def parser_of(name: str) -> OutputParser:
    numbers = count()
    return OutputParser(walker_of(name).output_format, lambda: f"call{next(numbers)}", tools=TOOLS)


def text_of(name: str) -> str:
    """A call with a long text, as the template writes it."""
    call = ToolCall("functions.edit:0", "edit", {"path": WORDS, "n": 3})
    answer = Message(Role.ASSISTANT, "", tool_calls=(call,))
    return said(walker_of(name).tokenizer, answer)


def has_late_id(name: str) -> bool:
    """Whether the id of a call is written after its arguments."""
    syntax = walker_of(name).output_format.description.calls
    return syntax is not None and bool(getattr(syntax.body, "id", ()))


@pytest.mark.parametrize("name", list(ALL))
def test_arguments_follow_their_tokens_within_three(name: str) -> None:
    """Each word of a text is sent three tokens after it was sampled, at most."""
    walker = walker_of(name)
    parser = parser_of(name)
    parts = list[AnswerPart]()
    tokens = walker.encode(text_of(name))
    if has_late_id(name):
        pytest.skip("the id of a call comes after its arguments, and belongs to its beginning")
    for at, token in enumerate(tokens):
        parts += parser.push(token)
        sampled = walker.tokenizer.decode(tokens[: max(0, at + 1 - MAX_TOKENS)])
        sent = "".join(part.text for part in parts if isinstance(part, ArgumentsPart))
        for word in WORDS.split():
            assert word not in sampled or word in sent, (word, sampled[-60:], sent[-60:])
    parts += parser.finish(FinishReason.EOS)
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert [json.loads(call.arguments_json) for call in calls] == [{"path": WORDS, "n": 3}]
    assert sum(isinstance(part, ArgumentsPart) for part in parts) > 10


@pytest.mark.parametrize("name", list(ALL))
def test_a_call_cut_in_its_arguments_is_what_was_sent(name: str) -> None:
    walker = walker_of(name)
    parser = parser_of(name)
    text = text_of(name)
    tokens = walker.encode(text[: text.index("w20")])
    parts = [part for token in tokens for part in parser.push(token)]
    parts += parser.finish(FinishReason.LENGTH)
    assert parser.is_cut
    if has_late_id(name):
        return
    (call,) = (part for part in parts if isinstance(part, ToolCallPart))
    sent = "".join(part.text for part in parts if isinstance(part, ArgumentsPart))
    assert (call.is_cut, call.arguments_json) == (True, sent)
    assert json.dumps({"path": WORDS}, separators=(",", ":")).startswith(sent)
    assert call.arguments == {"path": WORDS[: WORDS.index(" w20")]} or "w19" in sent


@pytest.mark.parametrize("name", [name for name in ALL if name != "channels"])
def test_a_name_that_no_tool_has_is_told_with_its_whole_call(name: str) -> None:
    """Its text may still turn out to be content."""
    walker = walker_of(name)
    parser = parser_of(name)
    parts = list[AnswerPart]()
    for token in walker.encode(text_of(name).replace("edit", "other")):
        parts += parser.push(token)
        is_told = any(isinstance(part, ToolCallStarted) for part in parts)
        assert is_told == any(isinstance(part, ToolCallPart) for part in parts)


@pytest.mark.parametrize("inside", ['a"b" c', 'say "hi", he said', 'x"'])
def test_text_with_bare_quotes_goes_on_to_the_end_of_the_call(inside: str) -> None:
    walker = walker_of("json")
    parser = parser_of("json")
    raw = f'<tool_call>{{"name": "edit", "arguments": {{"path": "{inside}"}}}}</tool_call>'
    parts = [part for token in walker.encode(raw) for part in parser.push(token)]
    parts += parser.finish(FinishReason.EOS)
    (call,) = (part for part in parts if isinstance(part, ToolCallPart))
    assert call.arguments == {"path": inside}
    assert sum(isinstance(part, ToolCallStarted) for part in parts) == 1


@pytest.mark.parametrize(("text", "value"), [('"5"', 5), ("'5'", 5), ('"a"', "a"), ("5", 5)])
def test_a_number_in_quotes_is_sent_as_a_number(text: str, value: int | str) -> None:
    walker = walker_of("coder")
    parser = parser_of("coder")
    raw = text_of("coder").replace("\n3\n", f"\n{text}\n")
    parts = [part for token in walker.encode(raw) for part in parser.push(token)]
    parts += parser.finish(FinishReason.EOS)
    (call,) = (part for part in parts if isinstance(part, ToolCallPart))
    assert json.loads(call.arguments_json) == call.arguments == {"path": WORDS, "n": value}
