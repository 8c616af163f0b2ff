"""Objects and lists as nested tags: derived, typed by the schema, read back and enforced."""

from typing import Any

import pytest

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.derivation import derive_format
from mlxstack.features.formats.syntax import FormatSource, TaggedBody
from tests.features.formats.formats import made_tokenizer
from tests.features.formats.invented import NESTED
from tests.features.formats.test_derived_formats import said

TEXT: dict[str, Any] = {"type": "string"}
TASK = {
    "type": "object",
    "properties": {"label": TEXT, "done": {"type": "boolean"}, "steps": {"$ref": "#/$defs/steps"}},
}
PARAMETERS = {
    "type": "object",
    "$defs": {"steps": {"type": "array", "items": {"type": "integer"}}},
    "properties": {
        "path": TEXT,
        "names": {"type": "array", "items": TEXT},
        "tasks": {"type": "array", "items": TASK},
        "limit": {"oneOf": [{"type": "integer"}, {"type": "object", "properties": {"max": {}}}]},
        "which": {"anyOf": [{"type": "array", "items": TEXT}, TASK]},
        "words": {"anyOf": [TEXT, TASK]},
        "free": {"type": "object"},
        "entry": {"type": "object", "properties": {"entry": {"type": "integer"}}},
    },
}
TOOLS = (Tool("plan", "Plans.", PARAMETERS),)
VALUES: list[dict[str, Any]] = [
    {"path": "a.py"},
    {"path": "    if (a < b) {\n}\n"},
    {"names": ["5", "true", "a, b"]},
    {"names": []},
    {"tasks": [{"label": "1", "done": False, "steps": [1, 2]}, {"label": "null"}]},
    {"limit": 5},
    {"limit": {"max": 10}},
    {"which": ["7"]},
    {"which": {"label": "7", "done": True}},
    {"words": "hi"},
    {"free": {"a": {"b": [1, 2.5, True, None]}, "c": "d e"}},
    {"entry": {"entry": 3}},
    {},
]


@pytest.fixture(scope="module", params=NESTED)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return made_tokenizer(NESTED[request.param])


@pytest.mark.parametrize("arguments", VALUES, ids=str)
def test_nested_tags_are_read_as_they_were_written(
    tokenizer: Any, arguments: dict[str, Any]
) -> None:
    found = derive_format(tokenizer)
    assert (found.source, found.problems) == (FormatSource.DERIVED, ())
    assert found.calls is not None
    assert isinstance(found.calls.body, TaggedBody)
    assert found.calls.body.item == "entry"
    calls = (ToolCall("a", "plan", arguments), ToolCall("b", "plan", {"path": "b"}))
    text = said(tokenizer, Message(Role.ASSISTANT, "So:", "Hm.", calls))
    read = read_answer(found, text, TOOLS)
    assert [one.arguments for one in read.tool_calls] == [arguments, {"path": "b"}]
    assert (read.content.strip(), read.reasoning_content, read.n_unparsed) == ("So:", "Hm.", 0)


def test_a_tag_that_comes_again_makes_a_list(tokenizer: Any) -> None:
    given = {"free": {"tag": "a", "label": "b"}}
    call = ToolCall("a", "plan", given)
    text = said(tokenizer, Message(Role.ASSISTANT, "", tool_calls=(call,)))
    (read,) = read_answer(derive_format(tokenizer), text.replace("label", "tag"), TOOLS).tool_calls
    assert read.arguments == {"free": {"tag": ["a", "b"]}}


def test_tags_in_a_text_are_text(tokenizer: Any) -> None:
    arguments = {"path": "<b>bold</b>", "words": "<label>5</label>"}
    call = ToolCall("a", "plan", arguments)
    text = said(tokenizer, Message(Role.ASSISTANT, "", tool_calls=(call,)))
    (read,) = read_answer(derive_format(tokenizer), text, TOOLS).tool_calls
    assert read.arguments == arguments
