"""Any cut of an answer's text gives the same message, in every registered and derived format."""

import json
from collections.abc import Iterable
from functools import cache
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mlxstack.core.conversation import Tool
from mlxstack.core.engine_events import FinishReason
from mlxstack.core.response_parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
)
from mlxstack.features.formats.answer_reader import AnswerReader, Spoken
from mlxstack.features.formats.families import FAMILIES
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls, call_grammar
from mlxstack.features.formats.output_parser import OutputParser
from mlxstack.features.formats.syntax import DerivedFormat, pieces
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.tokens.special_tokens import nameless
from tests.features.formats import syntaxes
from tests.features.formats.call_walks import ALL, walker_of
from tests.features.formats.formats import respelled
from tests.features.formats.test_derived_formats import ANSWERS, TOOLS, message, said
from tests.features.formats.test_forced_tool_call import PERSON, marks_of, written

REGISTERED = syntaxes.FORMATS | {one.format.name: one.format for one in FAMILIES}
GREET = (Tool("greet", "", PERSON),)
# These templates write ids, or several calls in a message, that no model of the format writes.
UNFAITHFUL = ("section", "channels")
FUNCTIONARY = 'all\nSo:<|eot_id|>>>>greet\n{"name": "a"}'


@cache
def derived(name: str) -> tuple[DerivedFormat, tuple[str, ...]]:
    """A format of a template, and answers that the template wrote."""
    walker = walker_of(name)
    texts = tuple(said(walker.tokenizer, message(one, "So:", "Hm.")) for one in ANSWERS)
    return walker.output_format.description, texts


@pytest.fixture(scope="module")
def calls(chatml: Any) -> dict[str, str]:
    """A call of each registered format, as its grammar writes it."""
    compiler = GrammarCompiler(chatml, len(chatml))
    found = {"functionary": FUNCTIONARY}
    for name in REGISTERED:
        if name not in found:
            marks = marks_of(name, nameless(chatml))
            asked = call_grammar(ForcedCalls(GREET, marks, is_single=True)).text
            rules = compiler.compile(asked, "tools")
            assert rules is not None
            found[name] = marks.forced + written(chatml, rules, Random(name))
    return found


def joined(spoken: list[Spoken]) -> tuple[str, str, list[Any]]:
    """Thought, content, and everything else in its order."""
    thought = "".join(one.text for one in spoken if isinstance(one, ReasoningPart))
    content = "".join(one.text for one in spoken if isinstance(one, ContentPart))
    return thought, content, in_one_piece(spoken)


def in_one_piece(spoken: Iterable[Spoken]) -> list[Any]:
    """All but the text; the pieces of each call as one, which they add up to."""
    others: list[Any] = []
    for one in spoken:
        if isinstance(one, ArgumentsPart) and isinstance(others[-1], ArgumentsPart):
            others[-1] = ArgumentsPart(others[-1].text + one.text)
        elif not isinstance(one, ReasoningPart | ContentPart):
            if isinstance(one, ToolCallPart):
                check_whole(one, others[-1].text if isinstance(others[-1], ArgumentsPart) else "")
            others.append(one)
    return others


def check_whole(ended: ToolCallPart, text: str) -> None:
    """The pieces are the call; only those of a cut call are no whole object."""
    assert text == ended.arguments_json
    if not ended.is_cut:
        assert json.loads(text) == ended.arguments
        assert text.encode() == msgspec.json.encode(ended.arguments)


def broken(found: DerivedFormat, text: str, data: Any) -> str:
    """The text with up to two stretches replaced by stray marks."""
    marks = [one for mark in found.marks for one in pieces(mark)]
    marks += ["```", '\n{"name": "edit"', "'"]
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(at, min(len(text), at + 9)))
        text = text[:at] + data.draw(st.sampled_from(["", " ", "x", *marks])) + text[end:]
    return text


def check_splits(found: DerivedFormat, tools: tuple[Tool, ...], text: str, data: Any) -> None:
    """The text, and one broken by stray marks: what is said early is never taken back."""
    text = broken(found, text, data)
    is_whole = data.draw(st.booleans())
    is_open = data.draw(st.booleans())
    whole = AnswerReader(found, tools, is_open=is_open)
    expected = joined([*whole.feed(text), *whole.finish(is_whole=is_whole)])
    random = Random(data.draw(st.integers(0, 99)))
    spoken = []
    reader = AnswerReader(found, tools, is_open=is_open)
    rest = text
    while rest:
        n = random.choice([1, 1, 2, 3, 8])
        spoken += reader.feed(rest[:n])
        rest = rest[n:]
    assert joined([*spoken, *reader.finish(is_whole=is_whole)]) == expected


def shown(deltas: Iterable[AnswerPart]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thought, content and calls of these deltas."""
    thought = "".join(one.text for one in deltas if isinstance(one, ReasoningPart))
    content = "".join(one.text for one in deltas if isinstance(one, ContentPart))
    calls = (one for one in deltas if isinstance(one, ToolCallPart))
    return thought, content, [(call.name, call.arguments_json) for call in calls]


def parser_of(name: str, stops: tuple[str, ...]) -> OutputParser:
    numbers = count()
    return OutputParser(
        walker_of(name).output_format, lambda: f"call{next(numbers)}", tools=TOOLS, stops=stops
    )


def check_moments(name: str, text: str, stops: tuple[str, ...], widths: Random) -> Any:
    """The answer in other tokens: all that is shown at a moment begins the final message."""
    walker = walker_of(name)
    whole = parser_of(name, stops)
    deltas = [one for token in walker.encode(text) for one in whole.push(token)]
    final = shown([*deltas, *whole.finish(FinishReason.EOS)])
    parser = parser_of(name, stops)
    deltas = []
    for token in respelled(walker.tokenizer, text, lambda: widths.choice([1, 1, 2, 3, 8])):
        deltas += parser.push(token)
        thought, content, calls = shown(deltas)
        assert final[0].startswith(thought) and final[1].startswith(content)
        assert final[2][: len(calls)] == calls
    assert shown([*deltas, *parser.finish(FinishReason.EOS)]) == final
    return final


SETTINGS = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", ALL)
@SETTINGS
@given(data=st.data())
def test_a_derived_format_reads_any_split(name: str, data: Any) -> None:
    found, texts = derived(name)
    check_splits(found, TOOLS, data.draw(st.sampled_from(texts)), data)


@pytest.mark.parametrize("name", ALL)
@SETTINGS
@given(data=st.data())
def test_no_delta_shows_what_has_to_be_taken_back(name: str, data: Any) -> None:
    found, texts = derived(name)
    text = data.draw(st.sampled_from(texts))
    widths = Random(data.draw(st.integers(0, 99)))
    stops = data.draw(st.sampled_from([(), ("So:x",), ("o:", "e")]))
    thought, content, _ = check_moments(name, text, stops, widths)
    if name not in UNFAITHFUL:
        assert content.strip() == ("S" if "e" in stops else "So:")
    assert thought.strip() in {"", "Hm."}
    check_moments(name, broken(found, text, data), stops, widths)


@pytest.mark.parametrize("name", REGISTERED)
@SETTINGS
@given(data=st.data())
def test_a_registered_format_reads_any_split(calls: dict[str, str], name: str, data: Any) -> None:
    found = REGISTERED[name]
    marks = found.reasoning
    thought = f"{marks.opens}Hm.{marks.closes}" if marks and data.draw(st.booleans()) else ""
    text = "So: é < [ " if found.channels is None and data.draw(st.booleans()) else ""
    check_splits(found, GREET, f"{thought}{text}{calls[name]}", data)


@pytest.mark.parametrize("name", REGISTERED)
def test_no_mark_of_a_registered_format_is_content(calls: dict[str, str], name: str) -> None:
    reader = AnswerReader(REGISTERED[name], GREET)
    thought, content, others = joined([*reader.feed(calls[name]), *reader.finish()])
    assert (thought, content.replace("So:", "").strip()) == ("", "")
    assert others
