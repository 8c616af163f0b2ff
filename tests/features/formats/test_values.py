"""Values of each notation become JSON, however their text is cut."""

import json
from typing import Any

import pytest

from mlxstack.core.conversation import Tool
from mlxstack.features.formats.argument_values import ArgumentTypes
from mlxstack.features.formats.notations import (
    JSON,
    PYTHON,
    GemmaArguments,
    PythonArguments,
    gemma_notation,
)
from mlxstack.features.formats.syntax import PythonBody
from mlxstack.features.formats.values import ValueCopier

STRING = {"type": "string"}
TOOL = Tool(
    "edit",
    "",
    {
        "properties": {
            "path": STRING,
            "n": {"type": "integer"},
            "tags": {"type": "array"},
            "more": {"type": "object"},
        }
    },
)
TYPES = ArgumentTypes((TOOL,))


def copied(text: str, **kinds: Any) -> ValueCopier:
    """The value of a text, at once and letter by letter."""
    whole = ValueCopier(0, **kinds)
    whole.read(text, is_final=True)
    copier = ValueCopier(0, **kinds)
    for end in range(len(text) + 1):
        copier.read(text[:end], is_final=False)
        assert whole.written.startswith(copier.written) or not whole.is_done
    copier.read(text, is_final=True)
    assert (copier.written, copier.is_done) == (whole.written, whole.is_done)
    return whole


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -2.5, true, null, "x\\u00e9\\n"]}', {"a": [1, -2.5, True, None, "xé\n"]}),
        ('["\\ud83e\\udde0", "\\ud83e", "\\u12", "\\q"]', ["🧠", "�", "\\u12", "\\q"]),
        ("{'a': 'it\\'s', \"b\": True, 'c': None}", {"a": "it's", "b": True, "c": None}),
        ("{a: 1, b_c: {d: []}}", {"a": 1, "b_c": {"d": []}}),
        ('{{"a": {"b": 1}}}', {"a": {"b": 1}}),
        ('{"a": 1, "a": 2}', {"a": 1}),
        ('[{"a": 1} {"b": 2}]', [{"a": 1}, {"b": 2}]),
        ("[1, 2,]", [1, 2]),
    ],
)
def test_json_may_be_written_as_models_write_it(text: str, value: Any) -> None:
    copier = copied(text, notation=JSON)
    assert copier.is_done and copier.value() == value
    assert copier.written == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    "text", ['{"a": "say "hi" now"}', '{"a" 1}', "{1, 2}", '{"a": nan}', '["a"', "{{}", "\\"]
)
def test_what_is_no_json_is_broken(text: str) -> None:
    assert not copied(text, notation=JSON).is_done


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(path='a', n=3)", {"path": "a", "n": 3}),
        ("('a', 3)", {"path": "a", "n": 3}),
        ("(path='it's \"a\"', n=07)", {"path": 'it\'s "a"', "n": 7}),
        ("(n='07')", {"n": 7}),
        ('(path="""a\\n"b"""")', None),
        ('(path="""a\n"b" c""")', {"path": 'a\n"b" c'}),
        ("(tags={'b', 'a'}, more={'b': (1, 2)})", {"tags": ["b", "a"], "more": {"b": [1, 2]}}),
        ("(path=src/a.py, n=3)", {"path": "src/a.py", "n": 3}),
        ("(path = 'a' , n = 3)", {"path": "a", "n": 3}),
        ("()", {}),
        ("('a', 3, [], {}, 5)", None),
        ("('it's')", None),
        ("(n=3, 'a')", None),
    ],
)
def test_arguments_of_python_have_names_or_places(text: str, value: Any) -> None:
    arguments = PythonArguments(TYPES, "edit", PythonBody())
    copier = copied(text, notation=PYTHON, arguments=arguments)
    assert copier.is_done == (value is not None)
    if value is not None:
        assert copier.value() == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{path:<|"|>a, b<|"|>,n:3}', {"path": "a, b", "n": 3}),
        ("{path:a, b: {c},n:3}", {"path": "a, b: {c}", "n": 3}),
        ("{more:{a:[1,b]}}", {"more": {"a": [1, "b"]}}),
    ],
)
def test_texts_of_gemma_may_lack_marks(text: str, value: Any) -> None:
    arguments = GemmaArguments(TYPES, "edit")
    copier = copied(text, notation=gemma_notation('<|"|>'), arguments=arguments)
    assert copier.is_done and copier.value() == value


def test_the_longest_name_after_a_name_space_is_the_tool() -> None:
    tools = ArgumentTypes([Tool("read", ""), Tool("fs.read", ""), Tool("x.call", "")])
    assert tools.name("functions.fs.read") == "fs.read"
    assert tools.name("web.read") == "read"
    assert tools.name("x.call") == "x.call"
    assert tools.name("read.call") == "read"
    assert tools.name("other.write") == "other.write"
