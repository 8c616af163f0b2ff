"""Fuzzes what a model says: thoughts, words and calls of every parser, in any order and state."""

import itertools
import json
import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from mlx_lm import tool_parsers
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.core.response_parts import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from mlxstack.demo import MODEL_DIR
from mlxstack.features.formats.answer_reader import AnswerReader, Calls, read_answer
from mlxstack.features.formats.checked_calls import Parser, parse_calls, tool_schemas
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.features.formats.output_parser import OutputParser
from tests.features.formats.syntaxes import FORMATS
from tests.fuzz.dice import Dice

TOOL = Tool(
    "weather",
    "Tells it.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "more": {"type": "array", "items": {"type": "object"}},
        },
    },
)
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=weather>", "</function>",
    "<parameter=city>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<invoke name=", "</invoke>", "[TOOL_CALLS]", "[ARGS]", "call:weather{", "<escape>", "weather",
    '{"name": "weather", "arguments": {', '"city": "Ulm"', "}}", "}", "\n", ",", ":", '"', "'",
    "days=1e999", "(", ")", "[", "]", "functions.weather:0", "<|channel|>", "<|message|>", "None",
    " to=functions.weather", "<|call|>", "city", "Ulm", "null", "STOP", "\U0001f9e0", "9" * 5000,
    "\\",
)  # fmt: skip


@cache
def parsers() -> tuple[Parser, ...]:
    """Those of mlx-lm."""
    modules = (import_module(f"{tool_parsers.__name__}.{m.name}") for m in _modules())
    return tuple(m.parse_tool_call for m in modules if hasattr(m, "parse_tool_call"))


@cache
def voice() -> OutputFormat:
    """Of the demo model."""
    return OutputFormat(load_tokenizer(MODEL_DIR))


def answers(data: bytes) -> None:
    """Raises when a parser raises, a call cannot be sent on, or a text that was said is lost."""
    dice = Dice(data)
    text = dice.text(MARKS) + dice.text(MARKS)
    if dice.chance(30):
        _read(dice, text)
    elif dice.chance(50):
        for call in parse_calls(dice.pick(parsers()), text, tool_schemas([TOOL])):
            _check(call)
    else:
        _speak(dice, text)


def _read(dice: Dice, text: str) -> None:
    """Read a text by one of many formats, at once and letter by letter."""
    output_format = FORMATS[dice.pick(tuple(sorted(FORMATS)))]
    is_in_thinking = dice.chance(30)
    whole = read_answer(output_format, text, (TOOL,), is_in_thinking=is_in_thinking)
    for call in whole.tool_calls:
        _check(call)
    reader = AnswerReader(output_format, (TOOL,), is_in_thinking=is_in_thinking)
    parts = [part for letter in text for part in reader.feed(letter)] + reader.finish()
    calls = [call for part in parts if isinstance(part, Calls) for call in part.calls]
    assert [c.arguments for c in calls] == [c.arguments for c in whole.tool_calls], text


def _speak(dice: Dice, text: str) -> None:
    stops = ("STOP",) if dice.chance(30) else ()
    ids = (f"call_{n}" for n in itertools.count())
    tools = (TOOL,) if dice.chance(70) else ()
    is_in_thinking = dice.chance(30)
    is_raw = dice.chance(20)
    speech = OutputParser(
        voice(),
        lambda: next(ids),
        tools=tools,
        stops=stops,
        is_in_thinking=is_in_thinking,
        is_raw=is_raw,
    )
    tokens = voice().tokenizer.encode(text, add_special_tokens=False)
    parts: list[Any] = []
    for token in tokens:
        parts += speech.push(token)
    parts += speech.finish(dice.pick(tuple(FinishReason)))
    for part in parts:
        assert isinstance(part, AnswerPart)
        if isinstance(part, ToolCallPart):
            _check(ToolCall(part.id, part.name, part.arguments))
    if not stops and is_raw and not voice().special & {*tokens}:
        heard = "".join(
            part.text for part in parts if isinstance(part, ContentPart | ReasoningPart)
        )
        assert heard == voice().tokenizer.decode(tokens), (heard, text)


def _check(call: ToolCall) -> None:
    assert call.name
    whole = {"id": call.id, "name": call.name, "arguments": call.arguments}
    json.loads(json.dumps(whole, ensure_ascii=False).encode())


def _modules() -> Any:
    return pkgutil.iter_modules(tool_parsers.__path__)
