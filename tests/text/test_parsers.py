"""Arguments of tool calls arrive exactly as they were written, in every tag format."""

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.text.output_format import OutputFormat, ParseOptions
from mlxstack.text.output_parser import OutputParser, TextPiece, ToolCallPiece
from mlxstack.text.parsers import parser_for
from mlxstack.text.tool_call_parser import parse_calls, tool_schemas
from tests.text.conftest import CHATML, CHATML_SPECIAL, byte_level, loaded

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
    return f"{name}\n{''.join(items)}"


def minimax(name: str, arguments: Arguments) -> str:
    items = (f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
    return f'\n<invoke name="{name}">\n{"".join(items)}</invoke>\n'


def qwen(name: str, arguments: Arguments) -> str:
    items = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<function={name}>\n{''.join(items)}</function>\n"


WRITERS: dict[str, Callable[[str, Arguments], str]] = {
    "glm47": glm,
    "laguna": glm,
    "minimax_m2": minimax,
    "qwen3_coder": qwen,
}
FORMATS = pytest.mark.parametrize("name", WRITERS)
JSON_CALL = '\n{"name": "edit", "arguments": {"path": "%s"}}\n'


def parsed(name: str, text: str) -> tuple[ToolCall, ...]:
    module = importlib.import_module(f"{tool_parsers.__name__}.{name}")
    return parse_calls(parser_for(name, module.parse_tool_call), text, tool_schemas(TOOLS))


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm47", '{"name": "edit", "arguments": {"path": "a"}}'),
        ("minimax_m2", "<invoke name='edit'><parameter name=path>a</parameter></invoke>"),
        ("qwen3_coder", "words <function=edit>\n<parameter=path\na</parameter></function>"),
    ],
)
def test_other_forms_are_left_to_the_published_parser(name: str, text: str) -> None:
    (call,) = parsed(name, text)
    assert (call.name, call.arguments) == ("edit", {"path": "a"})


def test_mistral_calls_may_have_an_id() -> None:
    one = 'edit[CALL_ID]abcdefghi[ARGS]{"path": "[CALL_ID]x[ARGS]"}'
    assert parsed("mistral", one) == (ToolCall("abcdefghi", "edit", {"path": "[CALL_ID]x[ARGS]"}),)
    two = parsed("mistral", f"{one}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}")
    assert two[1] == ToolCall("123456789", "now", {})
    assert parsed("mistral", "now[ARGS]{}") == (ToolCall("", "now", {}),)
    assert parsed("mistral", 'edit[CALL_ID]abcdefghi[ARGS]{"path"') == ()


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OutputFormat]:
    """How models of several formats speak."""
    names = ("json_tools", "glm47", "qwen3_coder", "minimax_m2")
    folder = tmp_path_factory.mktemp("formats")
    loaded(folder, byte_level(CHATML_SPECIAL, []), CHATML, {"eos_token": "<|im_end|>"})
    return {
        name: OutputFormat(load_tokenizer(folder, {"tool_parser_type": name})) for name in names
    }


def hear(
    voice: OutputFormat, text: str, reason: FinishReason = FinishReason.EOS
) -> tuple[Any, str]:
    """The calls and the words of an answer."""
    ids = itertools.count()
    speech = OutputParser(voice, ParseOptions(tools=TOOLS), lambda: f"call_{next(ids)}")
    deltas = []
    for token in voice.tokenizer.encode(text, add_special_tokens=False):
        deltas += speech.push(token)
    deltas += speech.finish(reason)
    calls = [
        (one.call.name, one.call.arguments) for one in deltas if isinstance(one, ToolCallPiece)
    ]
    return calls, "".join(one.text for one in deltas if isinstance(one, TextPiece))


def written(voice: OutputFormat, path: str) -> str:
    form = WRITERS.get(voice.model_markers.format)
    inside = form("edit", {"path": path}) if form else JSON_CALL % path
    return f"{voice.model_markers.call_start}{inside}{voice.model_markers.call_end}"


def test_an_argument_may_hold_the_mark_that_closes_calls(voices: dict[str, OutputFormat]) -> None:
    for voice in voices.values():
        start, end = voice.model_markers.call_start, voice.model_markers.call_end
        path = f"{start} x {end} y {end}{end}"
        text = f"First.\n{written(voice, path)}\n{written(voice, 'b')}\nDone."
        calls, words = hear(voice, text)
        assert calls == [("edit", {"path": path}), ("edit", {"path": "b"})]
        assert words == "First.Done."


def test_a_call_that_never_closes_an_argument_hides_no_other(
    voices: dict[str, OutputFormat],
) -> None:
    voice = voices["json_tools"]
    broken = written(voice, 'a"b')
    for ending in ("", "\nDone.", f"\n{broken}"):
        calls, words = hear(voice, f"{broken}\n{written(voice, 'c')}{ending}")
        assert calls == [("edit", {"path": "c"})]
        assert words.startswith(broken)
        assert words.endswith(ending.strip())


def test_a_call_cut_inside_an_argument_is_dropped(voices: dict[str, OutputFormat]) -> None:
    for voice in voices.values():
        end = voice.model_markers.call_end
        text = written(voice, f"a {end} b")
        cut = text[: text.index(" b")]
        assert hear(voice, cut, FinishReason.LENGTH) == ([], "")
