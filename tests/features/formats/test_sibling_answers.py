"""Raw answers a little beside a template's form: each kind in each format means the same."""

import pytest

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.derivation import derive_format
from tests.features.formats.formats import FORMATS, made_tokenizer
from tests.features.formats.invented import INVENTED, NESTED
from tests.features.formats.siblings import FIRST, SECOND, SIBLINGS, answers
from tests.features.formats.test_derived_formats import TOOLS, said

ALL = {**FORMATS, **INVENTED, **NESTED, **SIBLINGS}
# Channels have no marks of calls; two are read by a family, and its own tests; the JSON of a call
# whose name stands before it too is read only as its template writes it.
NAMES = [name for name in ALL if name not in ("channels", "section", "quoted", "named twice")]


def written(name: str, n_calls: int) -> str:
    calls = (ToolCall(f"callid00{at}", "edit", one) for at, one in enumerate((FIRST, SECOND)))
    answer = Message(Role.ASSISTANT, "", tool_calls=tuple(calls)[:n_calls])
    return said(made_tokenizer(ALL[name]), answer)


@pytest.mark.parametrize("name", NAMES)
def test_answers_beside_the_form_of_a_template_are_read(name: str) -> None:
    found = derive_format(made_tokenizer(ALL[name]))
    assert found.source == "derived" and found.is_certain
    misread = []
    for raw in answers(found, written(name, 1), written(name, 2)):
        read = read_answer(found, raw.text, TOOLS, is_in_thinking=raw.is_in_thinking)
        got = (tuple(call.arguments for call in read.tool_calls), read.content.strip())
        if (*got, read.reasoning_content.strip()) != (raw.calls, raw.content, raw.thought):
            misread.append((raw.kind, raw.text, read))
    assert not misread


@pytest.mark.parametrize(
    "block",
    [
        '<|in|>json type="object"<|as|>{"path": "src/a.py", "n": 3}<|out|>json<|as|>',
        '<|in|>json<|as|>\n{"path": "src/a.py", "n": 3}\n<|out|>json<|as|>',
    ],
)
def test_a_block_of_json_stands_for_all_arguments(block: str) -> None:
    found = derive_format(made_tokenizer(INVENTED["sections"]))
    text = written("sections", 1)
    start = text.index("<|in|>part")
    end = text.rindex("<|out|>act<|as|>")
    read = read_answer(found, text[:start] + block + text[end:], TOOLS)
    assert [call.arguments for call in read.tool_calls] == [FIRST]
    assert (read.content, read.n_unparsed) == ("", 0)
