"""Each row of repairs has an answer, which is read with the row and not without it."""

from typing import Any

import pytest

from mlxstack.core.conversation import Tool
from mlxstack.features.formats import answer_reader, call_reader, json_calls, repairs
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.derivation import derive_format
from tests.features.formats.formats import tokenizer_of

TOOLS = (Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}}),)


def calls_of(raw: str, name: str = "json") -> list[Any]:
    read = read_answer(derive_format(tokenizer_of(name)), raw, TOOLS)
    return [(call.name, call.arguments) for call in read.tool_calls]


LS = [("bash", {"command": "ls"})]


@pytest.mark.parametrize("row", repairs.SYNTAXES, ids=lambda row: row.answer)
def test_a_call_may_have_this_syntax(
    row: repairs.ForeignSyntax, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = f"<tool_call>\n{row.answer}\n</tool_call>"
    assert calls_of(raw) == LS
    others = tuple(other for other in repairs.SYNTAXES if other != row)
    monkeypatch.setattr(call_reader, "SYNTAXES", others)
    assert calls_of(raw) == []


@pytest.mark.parametrize("row", repairs.MARKS, ids=lambda row: row.opens)
def test_calls_may_have_these_marks(
    row: repairs.ForeignMarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The marks of one row are those of most templates.
    name = "endless" if row.opens == "<tool_call>" else "json"
    assert calls_of(row.answer, name) == LS
    others = tuple(other for other in repairs.MARKS if other != row)
    monkeypatch.setattr(answer_reader, "MARKS", others)
    assert calls_of(row.answer, name) == []


@pytest.mark.parametrize("row", repairs.KEYS, ids=lambda row: row.answer)
def test_a_call_may_have_these_keys(
    row: repairs.ForeignKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = f"<tool_call>\n{row.answer}\n</tool_call>"
    assert calls_of(raw) == LS
    monkeypatch.setattr(json_calls, "NAME_KEYS", frozenset({"name"}))
    monkeypatch.setattr(json_calls, "ARGUMENT_KEYS", frozenset({"arguments"}))
    assert calls_of(raw) != LS
