"""Arguments of tool calls arrive exactly as they were written, in every tag format."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tool_parsers

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.response_parts import ContentPart
from mlxstack.features.formats.answer_reader import AnswerReader, Calls, Unparsed, read_answer
from mlxstack.features.formats.checked_calls import parse_calls, tool_schemas
from tests.features.formats import syntaxes

STRING = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": STRING,
        "old": STRING,
        "n": {"type": "integer"},
        "all": {"type": "boolean"},
        "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["path"],
}
TOOLS = (Tool("edit", "Edits.", SCHEMA), Tool("now"))
Arguments = dict[str, str]


def glm(name: str, arguments: Arguments) -> str:
    items = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(items)}</tool_call>"


def minimax(name: str, arguments: Arguments) -> str:
    items = (f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
    call = f'<invoke name="{name}">\n{"".join(items)}</invoke>'
    return f"<minimax:tool_call>\n{call}\n</minimax:tool_call>"


def qwen(name: str, arguments: Arguments) -> str:
    items = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(items)}</function>\n</tool_call>"


def plain_json(name: str, arguments: Arguments) -> str:
    (path,) = arguments.values()
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"path": "{path}"}}}}\n</tool_call>'


WRITERS: dict[str, Callable[[str, Arguments], str]] = {
    "glm47": glm,
    "minimax_m2": minimax,
    "qwen3_coder": qwen,
}
FORMATS = pytest.mark.parametrize("name", WRITERS)


def parsed(name: str, text: str) -> tuple[ToolCall, ...]:
    message = read_answer(syntaxes.FORMATS[name], text, TOOLS)
    return message.tool_calls if not message.content else ()


def arguments(name: str, **written: str) -> Any:
    (call,) = parsed(name, WRITERS[name]("edit", written))
    assert call.name == "edit"
    return call.arguments


@FORMATS
@pytest.mark.parametrize(
    "text",
    ["    if (a < b) {\n        x();\n    }", "\n\nlines\n", "\t", " ", "", "é 格\n", "null", "5"],
)
def test_text_keeps_its_white_space(name: str, text: str) -> None:
    assert arguments(name, path="a.py", old=text) == {"path": "a.py", "old": text}


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=12))
def test_any_text_is_read_as_it_was_written(text: str) -> None:
    for name in WRITERS:
        assert arguments(name, old=text, path="b") == {"old": text, "path": "b"}


@FORMATS
@pytest.mark.parametrize("text", ["</parameter>", "a</arg_value> b", "<tool_call>", "</invoke> x"])
def test_text_may_hold_a_closing_tag(name: str, text: str) -> None:
    assert arguments(name, old=text, path="b") == {"old": text, "path": "b"}


@FORMATS
def test_other_types_are_decoded(name: str) -> None:
    found = arguments(name, n=" 3", all="true", list='["a", {"b": null}]', maybe="null")
    assert found == {"n": 3, "all": True, "list": ["a", {"b": None}], "maybe": None}
    assert arguments(name, all="False", maybe="None") == {"all": False, "maybe": None}
    assert arguments(name, maybe=" null") == {"maybe": " null"}
    assert arguments(name, n="many") == {"n": "many"}


@FORMATS
def test_a_call_may_have_no_arguments(name: str) -> None:
    (call,) = parsed(name, WRITERS[name]("now", {}))
    assert (call.name, call.arguments) == ("now", {})


@pytest.mark.parametrize("name", ["glm47", "qwen3_coder"])
def test_a_call_may_be_json_between_the_marks_of_another_syntax(name: str) -> None:
    (call,) = parsed(name, '<tool_call>{"name": "edit", "arguments": {"path": "a"}}</tool_call>')
    assert (call.name, call.arguments) == ("edit", {"path": "a"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", plain_json("edit", {"path": "a b"})),
        ("glm47", glm("edit", {"path": "a b", "n": "3"})),
        ("qwen3_coder", qwen("edit", {"path": "a b", "n": "3", "all": "true"})),
        ("minimax_m2", minimax("edit", {"path": "a b", "n": "3"})),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0'
         '<|tool_call_argument_begin|>{"path": "a"}<|tool_call_end|><|tool_calls_section_end|>'),
        ("pythonic", '<|tool_call_start|>[edit(path="a", n=3), now()]<|tool_call_end|>'),
        ("gemma4", '<|tool_call>call:edit{path:<|"|>a<|"|>,n:3}<tool_call|>'),
    ],
)  # fmt: skip
def test_the_parsers_of_mlx_lm_read_the_same_calls(name: str, text: str) -> None:
    module = importlib.import_module(f"{tool_parsers.__name__}.{name}")
    inside = text.removeprefix(module.tool_call_start).removesuffix(module.tool_call_end)
    published = parse_calls(module.parse_tool_call, inside, tool_schemas(TOOLS))
    found = parsed(name, text)
    assert found
    assert [(one.name, one.arguments) for one in found] == [
        (one.name, one.arguments) for one in published
    ]


def test_python_text_with_a_line_break_has_no_escapes() -> None:
    raw = "<|tool_call_start|>[edit(path='{\n  \"x\\n\";\n}', n=3)]<|tool_call_end|>"
    (call,) = parsed("pythonic", raw)
    assert call.arguments == {"path": '{\n  "x\\n";\n}', "n": 3}
    (call,) = parsed("pythonic", raw.replace("\n  ", ""))
    assert call.arguments["path"] == '{"x\n";\n}'


def test_mistral_calls_may_have_an_id() -> None:
    one = '[TOOL_CALLS]edit[CALL_ID]abcdefghi[ARGS]{"path": "[CALL_ID]x[ARGS]"}'
    name = "named_with_id"
    assert parsed(name, one) == (ToolCall("abcdefghi", "edit", {"path": "[CALL_ID]x[ARGS]"}),)
    two = parsed(name, f"{one}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}")
    assert two[1] == ToolCall("123456789", "now", {})
    assert parsed(name, "[TOOL_CALLS]now[ARGS]{}") == (ToolCall("call_0", "now", {}),)
    other = parsed(name, "[TOOL_CALLS]other[CALL_ID]123456789[ARGS]{}")
    assert other == (ToolCall("123456789", "other", {}),)
    assert parsed(name, '[TOOL_CALLS]edit[CALL_ID]abcdefghi[ARGS]{"path"') == (
        ToolCall("abcdefghi", "edit", {}),
    )


def test_a_mark_that_is_said_twice_is_text_up_to_the_call() -> None:
    found = read_answer(syntaxes.FORMATS["mistral"], "[TOOL_CALLS][TOOL_CALLS]So:", TOOLS)
    assert (found.tool_calls, found.n_unparsed) == ((), 1)


CALLS = {**WRITERS, "json_tools": plain_json}
ENDS = dict.fromkeys(CALLS, "</tool_call>") | {"minimax_m2": "</minimax:tool_call>"}


def hear(name: str, text: str, *, is_whole: bool = True) -> tuple[Any, str]:
    """The calls and the words of an answer."""
    reader = AnswerReader(syntaxes.FORMATS[name], TOOLS)
    spoken = [*reader.feed(text), *reader.finish(is_whole=is_whole)]
    calls = [call for one in spoken if isinstance(one, Calls) for call in one.calls]
    expected = [one.text for one in spoken if isinstance(one, ContentPart)]
    expected += [one.raw for one in spoken if isinstance(one, Unparsed)]
    return [(call.name, call.arguments) for call in calls], "".join(expected)


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_may_hold_the_mark_that_closes_calls(name: str) -> None:
    end = ENDS[name]
    path = f"{end.replace('/', '')} x {end} y {end}{end}"
    one, two = (CALLS[name]("edit", {"path": value}) for value in (path, "b"))
    calls, text = hear(name, f"First.\n{one}\n{two}\nDone.")
    assert calls == [("edit", {"path": path}), ("edit", {"path": "b"})]
    assert text.split() == ["First.", "Done."]


def test_a_call_that_never_closes_an_argument_hides_no_other() -> None:
    broken, whole = (plain_json("edit", {"path": path}) for path in ('a"b', "c"))
    for ending in ("", "\nDone.", f"\n{broken}"):
        calls, text = hear("json_tools", f"{broken}\n{whole}{ending}")
        assert calls[:2] == [("edit", {"path": 'a"b'}), ("edit", {"path": "c"})]
        assert text.strip() == ("Done." if "Done" in ending else "")


def test_a_broken_call_of_an_unknown_tool_hides_no_other() -> None:
    broken, whole = (
        plain_json(tool, {"path": path}) for tool, path in (("x", 'a"b'), ("edit", "c"))
    )
    for ending in ("", "\nDone.", f"\n{broken}"):
        calls, text = hear("json_tools", f"{broken}\n{whole}{ending}")
        assert calls == [("edit", {"path": "c"})]
        assert broken in text
        assert ending.strip() in text


@pytest.mark.parametrize("name", CALLS)
def test_a_call_cut_inside_an_argument_is_dropped(name: str) -> None:
    text = CALLS[name]("edit", {"path": f"a {ENDS[name]} b"})
    assert hear(name, text[: text.index(" b")], is_whole=False) == ([], "")
