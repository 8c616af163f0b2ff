"""Any cut of an answer's text gives the same message, in every registered and derived format."""

from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mlxstack.core.conversation import Tool
from mlxstack.text.formats import DerivedFormat
from mlxstack.text.formats.answer_reader import AnswerReader, Content, Spoken, Thought
from mlxstack.text.formats.description import pieces
from mlxstack.text.formats.families import FAMILIES
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.grammar.forced_tool_call import ForcedCalls, call_grammars
from mlxstack.text.special_tokens import nameless
from tests.text import syntaxes
from tests.text.call_walks import ALL, walker_of
from tests.text.test_derived_formats import ANSWERS, TOOLS, message, said
from tests.text.test_forced import PERSON, marks_of, written

REGISTERED = syntaxes.FORMATS | {one.format.name: one.format for one in FAMILIES}
GREET = (Tool("greet", "", PERSON),)
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
    compiler, found = GrammarCompiler(chatml, len(chatml)), {"functionary": FUNCTIONARY}
    for name in REGISTERED:
        if name not in found:
            marks = marks_of(name, nameless(chatml))
            asked = call_grammars(ForcedCalls(GREET, marks, is_single=True))
            rules = compiler.compile(asked, "tools")
            assert rules is not None
            found[name] = marks.forced + written(chatml, rules, Random(name))
    return found


def joined(spoken: list[Spoken]) -> tuple[str, str, list[Any]]:
    """Thought, content, and everything else in its order."""
    thought = "".join(one.text for one in spoken if isinstance(one, Thought))
    content = "".join(one.text for one in spoken if isinstance(one, Content))
    return thought, content, [one for one in spoken if not isinstance(one, Thought | Content)]


def check_splits(found: DerivedFormat, tools: tuple[Tool, ...], text: str, data: Any) -> None:
    """The text, and one broken by stray marks: what is said early is never taken back."""
    marks = [one for mark in found.marks for one in pieces(mark)]
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(at, min(len(text), at + 9)))
        text = text[:at] + data.draw(st.sampled_from(["", " ", "x", *marks])) + text[end:]
    is_whole, is_open = data.draw(st.booleans()), data.draw(st.booleans())
    whole = AnswerReader(found, tools, is_open=is_open)
    expected = joined([*whole.feed(text), *whole.finish(is_whole=is_whole)])
    random, spoken = Random(data.draw(st.integers(0, 99))), []
    reader, rest = AnswerReader(found, tools, is_open=is_open), text
    while rest:
        n = random.choice([1, 1, 2, 3, 8])
        spoken += reader.feed(rest[:n])
        rest = rest[n:]
    assert joined([*spoken, *reader.finish(is_whole=is_whole)]) == expected


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


@pytest.mark.parametrize("name", REGISTERED)
@SETTINGS
@given(data=st.data())
def test_a_registered_format_reads_any_split(calls: dict[str, str], name: str, data: Any) -> None:
    found = REGISTERED[name]
    marks = found.reasoning
    thought = f"{marks.opens}Hm.{marks.closes}" if marks and data.draw(st.booleans()) else ""
    words = "So: é < [ " if found.channels is None and data.draw(st.booleans()) else ""
    check_splits(found, GREET, f"{thought}{words}{calls[name]}", data)


@pytest.mark.parametrize("name", REGISTERED)
def test_no_mark_of_a_registered_format_is_content(calls: dict[str, str], name: str) -> None:
    reader = AnswerReader(REGISTERED[name], GREET)
    thought, content, others = joined([*reader.feed(calls[name]), *reader.finish()])
    assert (thought, content.replace("So:", "").strip()) == ("", "")
    assert others
