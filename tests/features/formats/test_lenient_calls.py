"""Calls written a little otherwise than by templates, and answers cut inside of calls."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.core.response_parts import ContentPart
from mlxstack.features.formats.answer_reader import AnswerReader, Calls, Cut, Unparsed, read_answer
from mlxstack.features.formats.derivation import derive_format
from mlxstack.features.formats.families import FAMILIES
from mlxstack.features.formats.syntax import DerivedFormat
from tests.features.formats.formats import EACH, Format, made_tokenizer, tokenizer_of
from tests.features.formats.invented import INVENTED
from tests.features.formats.test_derived_formats import said

TOOLS = (Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}}),)
CALL = '{"name": "bash", "arguments": {"command": "ls"}}'
OTHER = '{"name": "bash", "arguments": {"command": "pwd"}}'
LS = ("bash", {"command": "ls"})
PWD = ("bash", {"command": "pwd"})
BARE = Format(
    EACH + "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' + (f.arguments | tojson) + '}' }}"
    "{%- endfor %}",
    reminder="",
)
FLAT = '{"name": "bash", "parameters": {"command": "ls"}}'


@pytest.fixture(scope="module")
def marked() -> DerivedFormat:
    return derive_format(tokenizer_of("json"))


@pytest.fixture(scope="module")
def bare() -> DerivedFormat:
    return derive_format(made_tokenizer(BARE))


def harmony() -> DerivedFormat:
    return next(one.format for one in FAMILIES if one.format.name == "harmony")


def calls_of(output_format: DerivedFormat, raw: str) -> list[Any]:
    read = read_answer(output_format, raw, TOOLS)
    assert (read.content.strip(), read.n_unparsed) == ("", 0)
    return [(call.name, call.arguments) for call in read.tool_calls]


def cut(output_format: DerivedFormat, raw: str) -> str:
    """The content of an answer that ends in the middle; all else of it is cut."""
    reader = AnswerReader(output_format, TOOLS)
    spoken = [*reader.feed(raw), *reader.finish(is_whole=False)]
    assert not [one for one in spoken if isinstance(one, Calls | Unparsed)]
    return "".join(one.text for one in spoken if isinstance(one, ContentPart))


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (CALL + "}", [LS]),
        (CALL + "}\n}", [LS]),
        (f"{CALL}\n{OTHER}", [LS, PWD]),
        (f"{CALL},\n{OTHER}", [LS, PWD]),
        (f"{CALL}\n{OTHER}}}", [LS, PWD]),
    ],
)
def test_a_pair_of_marks_may_hold_more_or_less(
    marked: DerivedFormat, inside: str, expected: list[Any]
) -> None:
    raw = f"<tool_call>\n{inside}\n</tool_call>"
    assert calls_of(marked, raw) == expected
    assert calls_of(marked, f"{raw}\n<tool_call>\n{OTHER}\n</tool_call>") == [*expected, PWD]


@pytest.mark.parametrize("lead", ["", "<|python_tag|>", "<|python_tag|>\n"])
def test_a_bare_call_may_follow_the_mark_of_code(bare: DerivedFormat, lead: str) -> None:
    typed = FLAT.replace("{", '{"type": "function", ', 1)
    for call in (FLAT, typed, FLAT + "}"):
        assert calls_of(bare, lead + call) == [LS]
    code = "<|python_tag|>print(1)"
    assert read_answer(bare, code, TOOLS).content == code


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=bash",
        "<|channel|>commentary to=functions.bash",
        "<|channel|>commentary to=tools.bash",
        "<|channel|>commentary to=functions.default_api.bash",
        " to=bash<|channel|>commentary json",
    ],
)
def test_a_recipient_may_be_the_bare_name_of_a_tool(header: str) -> None:
    assert calls_of(harmony(), header + '<|message|>{"command": "ls"}') == [LS]
    other = header.replace("bash", "python").replace("functions.", "")
    assert read_answer(harmony(), other + "<|message|>print(1)", TOOLS).content == "print(1)"


@pytest.mark.parametrize(
    "text",
    ["To call a tool write <tool_call> and its name.", "Use  <tool_call> x </tool_call>  twice."],
)
def test_prose_about_a_mark_keeps_its_white_space(marked: DerivedFormat, text: str) -> None:
    assert read_answer(marked, text, TOOLS).content == text


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "\n<|im_end|>"])
def test_the_end_of_a_turn_is_never_content(marked: DerivedFormat, ending: str) -> None:
    assert read_answer(marked, "Hello." + ending, TOOLS).content.strip() == "Hello."
    raw = f"<tool_call>\n{CALL}\n</tool_call>{ending}"
    assert calls_of(marked, raw) == [LS]
    thought = f"<think>Now.{raw}"
    read = read_answer(derive_format(made_tokenizer(THINKING)), thought, TOOLS)
    assert (len(read.tool_calls), read.content.strip()) == (1, "")


THINKING = Format(
    EACH + '{{- \'<tool_call>{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{- (f.arguments | tojson) + '}</tool_call>' }}{%- endfor %}",
    added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    thoughts="{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}"
    "{%- endif %}",
)


@pytest.mark.parametrize(
    "end", ["<tool_", "<tool_call>", '<tool_call>\n{"na', f"<tool_call>\n{CALL[:30]}"]
)
def test_a_cut_answer_shows_no_part_of_a_call(marked: DerivedFormat, end: str) -> None:
    assert cut(marked, "So: " + end).strip() == "So:"
    assert cut(marked, "a <").strip() == "a <"


def test_a_call_cut_in_its_closing_mark_is_whole(marked: DerivedFormat) -> None:
    reader = AnswerReader(marked, TOOLS)
    raw = f"So: <tool_call>\n{CALL}\n</tool"
    spoken = [*reader.feed(raw), *reader.finish(is_whole=False)]
    assert "".join(one.text for one in spoken if isinstance(one, ContentPart)).strip() == "So:"
    (calls,) = (one for one in spoken if isinstance(one, Calls))
    assert [(call.name, call.arguments) for call in calls.calls] == [LS]
    assert not calls.is_closed


@pytest.mark.parametrize("between", ["", "\n", ", ", ";\n"])
def test_signs_between_bare_calls_are_no_content(bare: DerivedFormat, between: str) -> None:
    read = read_answer(bare, f"{FLAT}{between}{FLAT.replace('ls', 'pwd')}", TOOLS)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [LS, PWD]
    assert read.content == ""


def test_an_apostrophe_in_a_malformed_list_opens_no_text(marked: DerivedFormat) -> None:
    raw = f"<tool_call>\n[{CALL}, {{x: don't}}]\n</tool_call>"
    read = read_answer(marked, f"{raw} and {raw}", TOOLS)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [LS, LS]
    assert read.content.strip() == "and"


def test_a_cut_bare_call_is_no_content(bare: DerivedFormat) -> None:
    for raw in (FLAT[:-5], FLAT[:20], "<|python_tag|>" + FLAT[:30]):
        assert cut(bare, raw) == ""
    other = '{"name": "Ulm", "size": 1'
    assert cut(bare, other) == other


def test_a_cut_call_without_its_first_mark_is_no_content() -> None:
    coder = derive_format(tokenizer_of("coder"))
    reader = AnswerReader(coder, TOOLS)
    spoken = [*reader.feed("<function=bash>\n<parameter=comm"), *reader.finish(is_whole=False)]
    assert any(isinstance(one, Cut) for one in spoken)
    assert not any(isinstance(one, ContentPart) for one in spoken)


def test_all_calls_that_end_an_open_thought_count() -> None:
    found = derive_format(made_tokenizer(THINKING))
    one = f"<tool_call>{CALL}</tool_call>"
    two = f"<tool_call>{OTHER}</tool_call>"
    read = read_answer(found, f"Now.{one}\n{two}\n", TOOLS, is_in_thinking=True)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [LS, PWD]
    assert read.reasoning_content == "Now."
    quoted = read_answer(found, f"Now.{one} or {two}</think>No.", TOOLS, is_in_thinking=True)
    assert (quoted.tool_calls, quoted.content) == ((), "No.")


CODER_TOOLS = (
    Tool("edit", "", {"properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}),
)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("a\n<parameter=n>\n3\n</parameter>", {"path": "a", "n": 3}),
        ("a\n<parameter=m>\n3\n</parameter>", {"path": "a\n<parameter=m>\n3"}),
        ("a\n<parameter=path>\n3\n</parameter>", {"path": "a\n<parameter=path>\n3"}),
        (
            "a\n<parameter=n>\n3\n</parameter>\n</parameter>",
            {"path": "a\n<parameter=n>\n3\n</parameter>"},
        ),
    ],
)
def test_another_argument_ends_a_value_that_nothing_closes(
    path: str, arguments: dict[str, Any]
) -> None:
    coder = derive_format(tokenizer_of("coder"))
    raw = f"<tool_call>\n<function=edit>\n<parameter=path>\n{path}\n</function>\n</tool_call>"
    read = read_answer(coder, raw, CODER_TOOLS)
    assert [call.arguments for call in read.tool_calls] == [arguments]
    assert (read.content, read.n_unparsed) == ("", 0)


def test_calls_at_the_end_of_a_closed_thought_count() -> None:
    found = derive_format(made_tokenizer(THINKING))
    one = f"<tool_call>{CALL}</tool_call>"
    two = f"<tool_call>{OTHER}</tool_call>"
    for end in ("</think>", "\n</think>\n\n"):
        read = read_answer(found, f"Now.{one}{end}", TOOLS, is_in_thinking=True)
        assert [(call.name, call.arguments) for call in read.tool_calls] == [LS]
        assert (read.reasoning_content, read.content.strip()) == ("Now.", "")
        read = read_answer(found, f"Now.{one}{end}{two}", TOOLS, is_in_thinking=True)
        assert [(call.name, call.arguments) for call in read.tool_calls] == [PWD]
        assert read.reasoning_content.strip() == f"Now.{one}"


@pytest.mark.parametrize("again", ["<think>", "<think>\n"])
def test_a_thought_that_the_prompt_opened_may_be_opened_again(again: str) -> None:
    found = derive_format(made_tokenizer(THINKING))
    read = read_answer(found, f"{again}Now.\n</think>\n\nYes.", (), is_in_thinking=True)
    assert (read.reasoning_content, read.content) == ("Now.", "Yes.")
    read = read_answer(found, f"A {again} mark.</think>Yes.", (), is_in_thinking=True)
    assert (read.reasoning_content, read.content) == (f"A {again} mark.", "Yes.")


@pytest.mark.parametrize("empty", ["<tool_call>", "<tool_call>\n</tool_call>\n"])
def test_marks_without_a_call_end_an_answer_without_a_word(
    marked: DerivedFormat, empty: str
) -> None:
    read = read_answer(marked, f"Sure. {empty}", TOOLS)
    assert (read.content.strip(), read.tool_calls, read.n_unparsed) == ("Sure.", (), 0)
    read = read_answer(marked, f"{empty}tell.", TOOLS)
    assert read.content.strip() == f"{empty}tell."


def test_a_thought_that_begins_with_calls_is_none() -> None:
    found = derive_format(made_tokenizer(THINKING))
    one = f"\n<tool_call>{CALL}</tool_call>"
    read = read_answer(found, f"{one}\nDone.", TOOLS, is_in_thinking=True)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [LS]
    assert (read.reasoning_content, read.content) == ("", "Done.")
    other = one.replace("bash", "other")
    read = read_answer(found, f"{other}\nDone.</think>No.", TOOLS, is_in_thinking=True)
    assert (read.tool_calls, read.content) == ((), "No.")


UNMARKED = [
    CALL,
    f"```json\n{CALL}\n```",
    f"```\n{CALL}\n```\n",
    f"[{CALL}]",
    CALL.replace('{"name', '{\n  "name'),
    CALL.replace("arguments", "parameters"),
    f'{{"type": "function", "function": {CALL}}}',
    '{"arguments": {"command": "ls"}, "name": "bash"}',
    "{'name': 'bash', 'arguments': {'command': 'ls'}}",
]
NO_CALLS = [
    f"Write {CALL}",
    f"{CALL}\nis an example.",
    f"```json\n{CALL}\n```\nDo so.",
    CALL.replace("bash", "other"),
    '{"name": "bash", "size": 3}',
    '{"name": "bash"',
    "```python\n{1: 2}\n```",
    "[a](b)",
]
PLACES = ["", "Sure.\n", "Sure:\n\n"]
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize("name", ["json", "coder", "keys", "endless"])
def test_an_answer_may_end_with_calls_without_marks(name: str) -> None:
    found = derive_format(tokenizer_of(name))
    for call in UNMARKED:
        for before in PLACES:
            read = read_answer(found, before + call, TOOLS)
            assert [(one.name, one.arguments) for one in read.tool_calls] == [LS], call
            assert read.content.strip() == before.strip()
    read = read_answer(found, f"Sure.\n{CALL}\n{OTHER}", TOOLS)
    assert [(one.name, one.arguments) for one in read.tool_calls] == [LS, PWD]
    read = read_answer(found, f"Sure.\n{HERMES}\n{HERMES}", TOOLS)
    assert [(one.name, one.arguments) for one in read.tool_calls] == [LS, LS]
    for text in NO_CALLS:
        read = read_answer(found, text, TOOLS)
        assert (read.tool_calls, read.content) == ((), text)
    assert read_answer(found, CALL, ()).content == CALL


@pytest.mark.parametrize(("true", "null"), [("True", "None"), ("true", "null")])
def test_a_call_may_be_a_python_dict(marked: DerivedFormat, true: str, null: str) -> None:
    arguments = f"{{'command': \"it's {{\", 'all': {true}, 'none': {null}}}"
    call = f"{{'name': 'bash', 'arguments': {arguments}}}"
    expected = [("bash", {"command": "it's {", "all": True, "none": None})]
    for raw in (call, f"<tool_call>\n{call}\n</tool_call>", f"```python\n{call}\n```"):
        assert calls_of(marked, raw) == expected


def test_a_bare_call_may_follow_text(bare: DerivedFormat) -> None:
    plain = python_calls(opens="", closes="")
    for form, call in ((bare, FLAT), (plain, '[bash(command="ls")]')):
        read = read_answer(form, f"Sure. {call}", TOOLS)
        assert [(one.name, one.arguments) for one in read.tool_calls] == [LS]
        assert read.content.strip() == "Sure."
        assert not read_answer(form, f"Sure. {call} is one.", TOOLS).tool_calls


def test_calls_in_python_may_have_text_without_quotes() -> None:
    found = derive_format(made_tokenizer(INVENTED["statements"]))
    assert calls_of(found, "<steps>\nbash(command=src/a.py)\n</steps>") == [
        ("bash", {"command": "src/a.py"})
    ]


ARGUMENTS = {"command": "ls"}
OTHER_KEYS: list[dict[str, Any]] = [
    {"function": "bash", "arguments": ARGUMENTS},
    {"tool": "bash", "parameters": ARGUMENTS},
    {"name": "bash", "args": ARGUMENTS},
    {"name": "bash", "input": ARGUMENTS},
    {"tool_name": "bash", "tool_input": ARGUMENTS},
    {"action": "bash", "action_input": ARGUMENTS},
    {"name": "bash", **ARGUMENTS},
    {"name": "functions.bash", "arguments": ARGUMENTS},
    {"name": "default_api:bash", "arguments": ARGUMENTS},
]


@pytest.mark.parametrize("call", OTHER_KEYS, ids=json.dumps)
def test_a_call_may_have_other_keys(marked: DerivedFormat, call: dict[str, Any]) -> None:
    assert calls_of(marked, f"<tool_call>\n{json.dumps(call)}\n</tool_call>") == [LS]


@pytest.mark.parametrize("name", ["json", "coder", "keys"])
def test_marks_of_a_call_may_be_doubled(name: str) -> None:
    found = derive_format(tokenizer_of(name))
    one = calling(name)
    assert calls_of(found, one) == [LS]
    assert calls_of(found, f"<tool_call>\n{one}\n</tool_call>") == [LS]
    assert calls_of(found, one.replace("bash", "functions.bash")) == [LS]
    read = read_answer(found, f"{one}\nIt closes with </tool_call>.", TOOLS)
    assert read.content.strip() == "It closes with </tool_call>."


def calling(name: str) -> str:
    """A call as the template of a format writes it."""
    answer = Message(Role.ASSISTANT, "", tool_calls=(ToolCall("callid001", *LS),))
    return said(tokenizer_of(name), answer)


def test_arguments_after_a_name_may_be_json_in_a_text() -> None:
    found = derive_format(tokenizer_of("endless"))
    raw = f"[TOOL_CALLS]bash[ARGS]{json.dumps(json.dumps(ARGUMENTS))}"
    assert calls_of(found, raw) == [LS]


def test_a_call_of_names_and_values_may_have_no_arguments() -> None:
    found = derive_format(tokenizer_of("quoted"))
    read = read_answer(found, "<|tool_call>call:bash<tool_call|>all|>", TOOLS)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [("bash", {})]
    assert read.content == "all|>"


PYTHON = 'bash(command="ls")'
ELEMENT = "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>"
INVOKE = '<invoke name="bash">\n<parameter name="command">ls</parameter>\n</invoke>'
WITHIN = [
    CALL.replace('"name"', "name").replace('"arguments"', "arguments"),
    f'{{"tool_calls": [{CALL}]}}',
    f"{{{CALL}}}",
    '{"bash": {"command": "ls"}}',
    'bash\n{"command": "ls"}',
    'bash[ARGS]{"command": "ls"}',
    PYTHON,
    f"[{PYTHON}]",
    ELEMENT,
    INVOKE,
    ELEMENT.replace("=bash", ' name="bash"').replace("=command", ' name="command"'),
]


@pytest.mark.parametrize("call", WITHIN)
def test_a_call_may_have_the_syntax_of_another_model(marked: DerivedFormat, call: str) -> None:
    raw = f"<tool_call>\n{call}\n</tool_call>"
    assert calls_of(marked, raw) == [LS]
    assert calls_of(marked, f"{raw}\n{raw}") == [LS, LS]
    other = raw.replace("bash", "other")
    assert read_answer(marked, other, TOOLS).tool_calls in (
        (),
        (ToolCall("call_0", "other", LS[1]),),
    )


ELSEWHERE = [
    f"<tools>\n{CALL}\n</tools>",
    f"<tool_calls>[{CALL}]</tool_calls>",
    f"<function_call>{CALL}</function_call>",
    f"[TOOL_CALLS][{CALL}]",
    '[TOOL_CALLS]bash[ARGS]{"command": "ls"}',
    f"<|tool_call|>{CALL}<|/tool_call|>",
    f"<|python_start|>[{PYTHON}]<|python_end|>",
    f"<|python_tag|>{PYTHON}",
    '<|python_tag|>bash.call(command="ls")',
    f"```tool_code\ndefault_api.{PYTHON}\n```",
    f"functools[{CALL}]",
    f"<function_calls>\n{INVOKE}\n</function_calls>",
    f'{{"tool_calls": [{CALL}]}}',
    f"[{PYTHON}]",
    f"```tool_code\n{PYTHON}\n```",
    ELEMENT,
    INVOKE,
]
EXAMPLES = [
    f"```python\n{PYTHON}\n```",
    f"Call it as `{PYTHON}`.",
    "Put it into <tools></tools>.",
    "Write [TOOL_CALLS] first.",
    "See <function=bash> for the form.",
    "import functools\nfunctools.reduce(bash, [])",
]


@pytest.mark.parametrize("name", ["json", "keys", "endless"])
def test_an_answer_may_end_with_a_call_in_the_marks_of_another_model(name: str) -> None:
    found = derive_format(tokenizer_of(name))
    for call in ELSEWHERE:
        if name == "endless" and call.startswith("[TOOL_CALLS]"):
            continue
        for before in PLACES:
            read = read_answer(found, before + call, TOOLS)
            assert [(one.name, one.arguments) for one in read.tool_calls] == [LS], call
            assert read.content.strip() == before.strip()
        for text in (f"{call}\nis an example.", call.replace("bash", "other")):
            read = read_answer(found, text, TOOLS)
            assert (read.tool_calls, read.content) == ((), text)
    for text in EXAMPLES:
        if name != "endless" or "TOOL_CALLS" not in text:
            assert read_answer(found, text, TOOLS).content == text


def test_the_name_space_of_a_call_may_be_left_out() -> None:
    found = next(one.format for one in FAMILIES if one.format.name == "kimi_k2")
    raw = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        '<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    for text in (raw, raw.replace("functions.", "")):
        assert calls_of(found, text) == [LS]


GEMMA = next(one.format for one in FAMILIES if one.format.name == "gemma4")
NAMED = 'call:bash{command:<|"|>ls<|"|>}'


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        (NAMED, ""),
        (f"Sure.\n{NAMED}", "Sure."),
        (f"{NAMED}<tool_call|>", ""),
        (f"<|channel>thought\nNow.<channel|>{NAMED}", ""),
        ("<|tool_call>call:bash{command:'ls'}<tool_call|>", ""),
        ('<|tool_call>call:bash{command:"ls"}<tool_call|>', ""),
        (f"<|tool_call>:{NAMED}<tool_call|>", ""),
    ],
)
def test_a_call_of_gemma_may_lack_marks(raw: str, content: str) -> None:
    read = read_answer(GEMMA, raw, TOOLS)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [LS]
    assert (read.content.strip(), read.n_unparsed) == (content, 0)


@pytest.mark.parametrize("between", ["", "\n", ", "])
def test_marks_of_gemma_may_hold_several_calls(between: str) -> None:
    raw = f"<|tool_call>{NAMED}{between}{NAMED.replace('ls', 'pwd')}<tool_call|>"
    assert calls_of(GEMMA, raw) == [LS, PWD]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('"a, b: {c}"', "a, b: {c}"),
        ('"say \\"a\\""', 'say "a"'),
        ("'a, b'", "a, b"),
        ("':\\s*\\w+'", ":\\s*\\w+"),
        ("a 'b' c", "a 'b' c"),
    ],
)
def test_a_text_of_gemma_may_have_other_quotes(written: str, text: str) -> None:
    call = f'<|tool_call>call:bash{{command:{written},n:<|"|>x<|"|>}}<tool_call|>'
    assert calls_of(GEMMA, call) == [("bash", {"command": text, "n": "x"})]
    reader = AnswerReader(GEMMA, TOOLS)
    spoken = [one for letter in call for one in reader.feed(letter)] + reader.finish()
    calls = [one.calls[0] for one in spoken if isinstance(one, Calls)]
    assert [one.arguments for one in calls] == [{"command": text, "n": "x"}]


@pytest.mark.parametrize(
    ("value", "items"),
    [("[1}", [1]), ("[b:c]", ["b"]), ("['b':1]", ["b"]), ("[ ,:]", []), ("[}", [])],
)
def test_a_list_of_gemma_ends_at_a_misplaced_sign(value: str, items: list[Any]) -> None:
    raw = f"<|tool_call>call:bash{{command:{value}}}<tool_call|>"
    assert calls_of(GEMMA, raw) == [("bash", {"command": items})]


@pytest.mark.parametrize("text", ["Phone call: now", "call:bash it", "call:other{a:1}", "call:ba"])
def test_a_word_before_a_colon_is_no_call_of_gemma(text: str) -> None:
    said = f"{text} and more."
    reader = AnswerReader(GEMMA, TOOLS)
    # Nothing waits for the rest of the answer.
    spoken = reader.feed(said)
    assert "".join(one.text for one in spoken if isinstance(one, ContentPart)) == said
    assert reader.finish() == []


@pytest.mark.parametrize(
    "value",
    [
        "<arg_key>path</arg_key>\na</arg_value>",
        "<arg_key>path<arg_value>a</arg_value>",
        "<arg_key>path</arg_key><arg_value>a",
    ],
)
def test_a_mark_between_key_and_value_may_be_left_out(value: str) -> None:
    keys = derive_format(tokenizer_of("keys"))
    raw = f"<tool_call>edit{value}<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
    read = read_answer(keys, raw, CODER_TOOLS)
    assert [call.arguments for call in read.tool_calls] == [{"path": "a", "n": 3}]
    assert (read.content, read.n_unparsed) == ("", 0)


def test_calls_of_a_list_may_lack_a_comma(marked: DerivedFormat) -> None:
    for between in ("", "\n", ", "):
        assert calls_of(marked, f"<tool_call>[{CALL}{between}{OTHER}]</tool_call>") == [LS, PWD]


def test_calls_without_marks_may_follow_a_thought_at_once() -> None:
    found = derive_format(made_tokenizer(THINKING))
    for call in (CALL, f"[{CALL}]", f"```json\n{CALL}\n```"):
        read = read_answer(found, f"<think>So, now.</think>{call}", TOOLS)
        assert [(one.name, one.arguments) for one in read.tool_calls] == [LS]
        assert (read.reasoning_content, read.content) == ("So, now.", "")


@pytest.mark.parametrize(
    ("before", "after", "content"),
    [
        ("So.\n\n", "\nThen.", "So.\n\nThen."),
        ("So.\n", "\n\nThen.\n", "So.\n\nThen.\n"),
        ("So. ", "Then.", "So. Then."),
        ("Let ", " or so", "Let or so"),
        ("So.", "", "So."),
        ("\n", "\n\nThen.", "Then."),
    ],
)
def test_white_space_between_the_texts_around_a_call_stays(
    marked: DerivedFormat, before: str, after: str, content: str
) -> None:
    raw = f"{before}{HERMES}{after}"
    read = read_answer(marked, raw, TOOLS)
    assert ([(one.name, one.arguments) for one in read.tool_calls], read.content) == ([LS], content)


def test_an_empty_list_of_calls_ends_an_answer_without_a_word(marked: DerivedFormat) -> None:
    read = read_answer(marked, "Nothing to do.\n<tool_call>[]</tool_call>", TOOLS)
    assert (read.content.strip(), read.tool_calls, read.n_unparsed) == ("Nothing to do.", (), 0)


def test_the_tags_of_a_call_may_have_a_space_before_the_name() -> None:
    coder = derive_format(tokenizer_of("coder"))
    raw = "<tool_call>\n<function =bash>\n<parameter =command>\nls\n</parameter>\n</function>"
    assert calls_of(coder, f"{raw}\n</tool_call>") == [LS]


def python_calls(**changed: str) -> DerivedFormat:
    found = next(one.format for one in FAMILIES if one.format.name == "pythonic")
    assert found.calls is not None
    return replace(found, calls=replace(found.calls, **changed))


def test_python_calls_may_stand_outside_of_a_list() -> None:
    plain = python_calls(opens="", closes="")
    both = f"{PYTHON}\n{PYTHON.replace('ls', 'pwd')}"
    assert calls_of(plain, both) == [LS, PWD]
    for text in (f"{PYTHON} is one.", "bash(1) runs it.", "other(command='ls')"):
        read = read_answer(plain, text, TOOLS)
        assert (read.tool_calls, read.content) == ((), text)


def test_a_number_of_a_python_call_may_begin_with_zeros() -> None:
    kinds = {"month": {"type": "integer"}, "zip": {"type": "string"}}
    tools = (Tool("pick", "", {"properties": kinds}),)
    raw = "<|tool_call_start|>[pick(month=07, zip=01234)]<|tool_call_end|>"
    read = read_answer(python_calls(), raw, tools)
    assert [one.arguments for one in read.tool_calls] == [{"month": 7, "zip": "01234"}]


def test_a_set_of_a_python_call_is_a_list() -> None:
    kinds = {"tags": {"type": "array"}, "more": {"type": "object"}}
    tools = (Tool("pick", "", {"properties": kinds}),)
    raw = "<|tool_call_start|>[pick(tags={'a'}, more={'b': 1})]<|tool_call_end|>"
    read = read_answer(python_calls(), raw, tools)
    assert [one.arguments for one in read.tool_calls] == [{"tags": ["a"], "more": {"b": 1}}]


@pytest.mark.parametrize("end", ["<|python_end|>", " <|python_end|>\n", "</tool_call>"])
def test_a_bare_call_may_be_closed_by_the_mark_of_another_model(
    bare: DerivedFormat, end: str
) -> None:
    assert calls_of(bare, FLAT + end) == [LS]
