"""Raw answers with malformed calls: all that can be read is, however the answer is cut."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.core.response_parts import ContentPart, ReasoningPart
from mlxstack.features.formats.answer_reader import AnswerReader, Calls, Unparsed, read_answer
from mlxstack.features.formats.derivation import derive_format
from mlxstack.features.formats.syntax import DerivedFormat
from tests.features.formats import syntaxes
from tests.features.formats.formats import made_tokenizer, tokenizer_of
from tests.features.formats.siblings import SIBLINGS
from tests.features.formats.test_lenient_calls import BARE, THINKING, python_calls

STRING = {"type": "string"}
TOOLS = (
    Tool("weather", "", {"properties": {"city": STRING, "days": {"type": "integer"}}}),
    Tool(
        "write", "", {"properties": {"path": STRING, "content": STRING, "tags": {"type": "array"}}}
    ),
    Tool("now", "", {"type": "object", "properties": {}}),
    Tool("find", "", {"properties": {"pattern": STRING, "-n": {"type": "boolean"},
                                     "-A": {"type": "integer"}, "$by": STRING}}),
)  # fmt: skip
PARIS = ("weather", {"city": "Paris"})
ROME = ("weather", {"city": "Rome"})
TWO_DAYS = ("weather", {"city": "Paris", "days": 2})


class Read(Struct, frozen=True):
    """The meaning of an answer."""

    calls: tuple[Any, ...]
    content: str = ""
    thought: str = ""


def pieces_of(raw: str, n_chars: int) -> Iterator[str]:
    return (raw[at : at + n_chars] for at in range(0, len(raw), n_chars))


def read(found: DerivedFormat, raw: str, n_chars: int, *, is_whole: bool = True) -> Read:
    reader = AnswerReader(found, TOOLS)
    spoken = [one for piece in pieces_of(raw, n_chars) for one in reader.feed(piece)]
    calls = []
    content = ""
    thought = ""
    for one in [*spoken, *reader.finish(is_whole=is_whole)]:
        match one:
            case Calls():
                calls += [(call.name, call.arguments) for call in one.calls]
            case ContentPart():
                content += one.text
            case Unparsed():
                content += one.raw
            case ReasoningPart():
                thought += one.text
    return Read(tuple(calls), content.strip(), thought.strip())


def check(found: DerivedFormat, raw: str, expected: Read) -> None:
    for n_chars in (len(raw), *range(1, 8)):
        assert read(found, raw, n_chars) == expected, n_chars


@cache
def format_of(name: str) -> DerivedFormat:
    if name in SIBLINGS:
        return derive_format(made_tokenizer(SIBLINGS[name]))
    return syntaxes.FORMATS.get(name) or derive_format(tokenizer_of(name))


GEMMA = [
    ("{city:Lyon, France}", {"city": "Lyon, France"}),
    ("{city:Paris,days:2}", {"city": "Paris", "days": 2}),
    ("{city:Lyon, France , days:2}", {"city": "Lyon, France", "days": 2}),
    ("{days:2,city:Lyon: north, then east. {so} [on]}", {"days": 2, "city": "Lyon: north, then "
     "east. {so} [on]"}),
    ("{city:see https://a.b/c,http://d.e, ok,days:2}", {"city": "see https://a.b/c,http://d.e, ok",
     "days": 2}),
    ("{city:Paris,country:France}", {"city": "Paris", "country": "France"}),
    ('{city:a, b,note:<|"|>x<|"|>}', {"city": "a, b", "note": "x"}),
    ('{"city":Paris, France,"days":2}', {"city": "Paris, France", "days": 2}),
    ('(city="Paris, France", days=2)', {"city": "Paris, France", "days": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("written", "arguments"), GEMMA)
@pytest.mark.parametrize("end", ["<tool_call|>", ""])
def test_a_text_of_gemma_without_quotes_goes_on_after_a_comma(
    written: str, arguments: dict[str, Any], end: str
) -> None:
    one = f"<|tool_call>call:weather{written}{end}"
    check(format_of("gemma4"), one, Read((("weather", arguments),)))
    if end:
        two = f"{one}<|tool_call>call:now{{}}<tool_call|>"
        check(format_of("gemma4"), two, Read((("weather", arguments), ("now", {}))))


SOUND = [f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' for city in ("Paris", "Rome")]
UNTOLD = [
    '{"name": "weather"; "arguments" {"city": "Oslo"}}',
    '{"arguments": {"city": "Oslo"}}',
    "{invalid json here}",
]
TOLD = ['{"name": "weather", "arguments": {"city": }}', '{"name": "weather", "arguments": Oslo}']
LISTS = {
    "json_list": "[TOOL_CALLS] [{}]",
    "list in tags": "<CALLS>[{}]</CALLS>",
    "lines of JSON": "<tool_call>[{}]</tool_call>",
    "glm47": "<tool_call>[{}]</tool_call>",
}


def lists_of(broken: str) -> list[str]:
    """Two sound calls, with a malformed one before, between or after them."""
    return [", ".join([*SOUND[:at], broken, *SOUND[at:]]) for at in range(3)]


@pytest.mark.parametrize("name", LISTS)
def test_a_malformed_call_of_a_list_hides_no_other(name: str) -> None:
    for broken in (*UNTOLD, *TOLD):
        for listed in lists_of(broken):
            raw = LISTS[name].replace("{}", listed)
            found = read(format_of(name), raw, len(raw))
            # A call that was sent already as far as it came stays one.
            calls = [one for one in found.calls if one[1]]
            assert (calls, found.content) == ([PARIS, ROME], "")
            check(format_of(name), raw, found)


def test_a_malformed_call_of_a_bare_list_hides_no_other() -> None:
    found = derive_format(made_tokenizer(BARE))
    for listed in lists_of(UNTOLD[1])[1:]:
        raw = f"[{listed}]".replace("arguments", "parameters")
        check(found, raw, Read((PARIS, ROME)))


@pytest.mark.parametrize("broken", UNTOLD)
def test_a_malformed_object_between_marks_hides_no_other(broken: str) -> None:
    raw = f"<tool_call>\n{SOUND[0]}\n{broken}\n{SOUND[1]}\n</tool_call>"
    check(format_of("lines of JSON"), raw, Read((PARIS, ROME)))


def test_a_cut_list_keeps_its_whole_calls() -> None:
    raw = f"[TOOL_CALLS][{SOUND[0]}, {SOUND[1][:40]}"
    assert read(format_of("json_list"), raw, len(raw), is_whole=False) == Read((PARIS,))


CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
INVOKE = '<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
UNCLOSED = {
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n{}",
        "<parameter=days>\n2\n",
        ["</function>\n</tool_call>\n", "</tool_call>\n", "</function>\n", ""],
        CODER,
    ),
    "glm47": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n{}",
        "<arg_key>days</arg_key>\n<arg_value>2\n",
        ["</tool_call>\n", ""],
        GLM,
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris\n{}',
        '<parameter name="days">2\n',
        ["</invoke>\n", ""],
        f"{INVOKE}</minimax:tool_call>",
    ),
}


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_call_cut_after_one_of_its_arguments_is_no_whole_call(name: str) -> None:
    opening, days, _, following = UNCLOSED[name]
    closing = "</arg_value>" if name == "glm47" else "</parameter>"
    raw = opening.replace("{}", closing)
    assert read(format_of(name), raw, 3, is_whole=False) == Read(())
    assert read(format_of(name), f"{raw}{days}{closing}", 3, is_whole=False) == Read(())
    assert len(read(format_of(name), raw, 3).calls) == 1
    assert read(format_of(name), f"{raw}\n{following}", 3, is_whole=False).calls[-1:] == (ROME,)


@pytest.mark.parametrize("begun", ["now", "nowa", "weather"])
def test_a_call_cut_in_its_name_is_no_whole_call(begun: str) -> None:
    ministral = derive_format(tokenizer_of("endless"))
    raw = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]'
    assert read(ministral, raw + begun, 3, is_whole=False) == Read((ROME,))
    assert read(ministral, f"{raw}now", 3) == Read((ROME, ("now", {})))


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_value_that_nothing_closes_ends_before_the_next_call(name: str) -> None:
    opening, days, ends, following = UNCLOSED[name]
    for end in ends:
        for inside, expected in (("", PARIS), (days, TWO_DAYS)):
            raw = f"{opening.replace('{}', inside)}{end}"
            check(format_of(name), raw, Read((expected,)))
            check(format_of(name), raw + following, Read((expected, ROME)))


def test_a_call_quoted_in_a_value_is_a_part_of_it() -> None:
    for name, call in (("qwen3_coder", CODER), ("glm47", GLM)):
        for quoted in (call, f"a {call} b\n{call}"):
            raw = (
                call.replace("weather", "write").replace("city", "content").replace("Rome", quoted)
            )
            check(format_of(name), raw, Read((("write", {"content": quoted}),)))
            # The text may go on to close the value.
            end = raw.rindex("</" + ("parameter" if name == "qwen3_coder" else "arg_value"))
            cut = read(format_of(name), raw[:end], 3, is_whole=False)
            assert (cut.calls, cut.content) == ((), "")


HARMONY = [
    (
        "<|channel|>analysis<|message|>Hm.<|channel|>commentary to=functions.weather"
        '<|message|>{"city": "Rome"}<|call|>',
        Read((ROME,), thought="Hm."),
    ),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>So.", Read((), "So.", "Hm.")),
    ("Hello there, my friend. How are you?", Read((), "Hello there, my friend. How are you?")),
    ("Hello.", Read((), "Hello.")),
]


@pytest.mark.parametrize(("raw", "expected"), HARMONY)
def test_messages_of_channels_may_lack_ends_and_headers(raw: str, expected: Read) -> None:
    check(format_of("harmony"), raw, expected)


def test_an_object_of_a_bare_format_is_a_call_by_its_name_or_arguments() -> None:
    found = derive_format(made_tokenizer(BARE))
    for text in ('{"name": "Anna", "age": 3}', '[{"name": "Anna", "age": 3}]'):
        check(found, text, Read((), text))
    check(found, '{"name": "other", "parameters": {"a": 1}}', Read((("other", {"a": 1}),)))


PROSE = [
    "import functools\n\n@functools.lru_cache\ndef fib(n):\n    return n",
    "functools is a module of Python, functools[1] is not.",
    "<function> is a tag, and <functional> programming is none.",
    '<function=x> is a tag, and so is <function name="x"> with a name.',
    '<invoke name="x"> is a tag that has a name, and nothing else.',
    '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b", "c"]}',
    "```\n{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\"}}}\n```\nDone.",
    "<tool_call> is a mark that some models write before a call.",
    "Use `<tool_call>` to call a tool, as other models do it.",
    "[TOOL_CALLS] is a mark that some models write before a call.",
    "Hello there, my friend. How are you? It is a fine day, is it not?",
]  # fmt: skip
MAX_HELD = 40
FORMATS = ["json_tools", "qwen3_coder", "glm47", "minimax_m2", "mistral", "gemma4", "harmony"]


@pytest.mark.parametrize("name", FORMATS)
def test_prose_is_held_no_longer_than_it_may_become_a_call(name: str) -> None:
    for text in PROSE:
        reader = AnswerReader(format_of(name), TOOLS)
        said = ""
        for at, letter in enumerate(text):
            said += "".join(one.text for one in reader.feed(letter) if isinstance(one, ContentPart))
            assert at + 1 - len(said) <= MAX_HELD, (text, said)
        assert re.sub(r"\s", "", said) in re.sub(r"\s", "", text)
        assert read(format_of(name), text, 3).content == text.strip()


POSITIONAL = {
    "weather('Rome')": [ROME],
    "weather('Paris', 2)": [TWO_DAYS],
    "weather('Paris', days=2), now()": [TWO_DAYS, ("now", {})],
    "find(pattern='a', -n=true, -A=3, $by='b')": [
        ("find", {"pattern": "a", "-n": True, "-A": 3, "$by": "b"})
    ],
    "find(-A=3, pattern='a-b=c')": [("find", {"-A": 3, "pattern": "a-b=c"})],
    "write(tags={'b', 'a', 'c', true})": [("write", {"tags": ["b", "a", "c", True]})],
}


@pytest.mark.parametrize("written", POSITIONAL)
def test_python_arguments_without_names_are_those_of_the_tool_in_order(written: str) -> None:
    raw = f"<|tool_call_start|>[{written}]<|tool_call_end|>"
    check(python_calls(), raw, Read(tuple(POSITIONAL[written])))


@pytest.mark.parametrize("inside", ["'Rome', 2, 3", "'it's'"])
def test_a_python_call_whose_arguments_are_unclear_is_said(inside: str) -> None:
    raw = f"<|tool_call_start|>[weather({inside})]<|tool_call_end|>"
    check(python_calls(), raw, Read((), raw))


@pytest.mark.parametrize("name", ["json", "coder", "keys", "section"])
def test_a_call_may_lack_its_first_mark_alone(name: str) -> None:
    closing = format_of(name).calls.closes.split()[-1]  # type: ignore[union-attr]
    for said in ("", "So:"):
        check(format_of(name), f"{said}\n{SOUND[1]}\n{closing}", Read((ROME,), said))
    later = f"{SOUND[1]}\n{closing}\nDone."
    check(format_of(name), later, Read((), later))


def test_an_empty_message_of_a_channel_is_a_call_without_arguments() -> None:
    raw = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    check(format_of("harmony"), f"{raw}<|call|>", Read((("now", {}),)))
    assert read(format_of("harmony"), raw, 3, is_whole=False) == Read(())


@pytest.mark.parametrize("end", ["</tool_call>", "\n</tool_call>", ""])
def test_a_call_without_arguments_may_close_one(end: str) -> None:
    check(format_of("glm47"), f"<tool_call>now</arg_value>{end}", Read((("now", {}),)))


@pytest.mark.parametrize("head", [":", "call:tools:", ":call:", "call:functions."])
def test_a_call_of_gemma_may_have_another_head(head: str) -> None:
    raw = f'<|tool_call>{head}weather{{city:<|"|>Rome<|"|>}}<tool_call|>'
    check(format_of("gemma4"), raw, Read((ROME,)))
    other = "<|tool_call> is how a call begins, like {this}."
    check(format_of("gemma4"), other, Read((), other))


def test_calls_that_end_an_open_thought_may_close_another_mark() -> None:
    found = derive_format(made_tokenizer(THINKING))
    raw = f"Now.<tool_call>{SOUND[1]}</tool_call>\n</tool_calls>"
    said = read_answer(found, raw, TOOLS, is_in_thinking=True)
    assert [(call.name, call.arguments) for call in said.tool_calls] == [ROME]
    assert (said.reasoning_content, said.content) == ("Now.", "")
