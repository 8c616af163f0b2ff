"""The input of a custom tool follows its grammar, where a regular expression can hold it."""

import json
import re
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import InputGrammar, Tool
from mlxstack.features.formats.grammar.tool_inputs import pattern_of, with_patterns
from mlxstack.text.grammar.lark_pattern import NoPattern, lark_pattern
from tests.features.formats.call_walks import walker_of
from tests.text.test_json_rules import is_value, rules_of

SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of Codex's `apply_patch` (openai/codex, apply_patch.lark)."""
MOMENT = r"^(?P<day>[0-9]{1,2})(?:st|nd)? at (?P<hour>[1-9])(?:AM|PM)$|^now|never$"
ESCAPED = r'start: "a\"b\n\\\d\xe9"'
PIECES = [
    *'()[]|?*+~.{}:"/\\\n #',
    "a",
    "start",
    "TOK",
    "0",
    "..",
    "->",
    "%ignore",
    "%import ",
    "common.",
]
SUM = """
start: NUMBER ("+" NUMBER)~1..2
%ignore WS
%import common (NUMBER, WS)
"""
TERMINALS = """
start: [SIGN] DIGITS | "off"i | TEXT
SIGN: "+" | "-"
DIGITS: "0".."9"+
%import common.ESCAPED_STRING -> TEXT
"""
ADDED = '*** Begin Patch\n*** Add File: a "b".txt\n+one\n+\n*** End Patch\n'
UPDATED = (
    "*** Begin Patch\n*** Update File: x\n*** Move to: y\n@@ def f():\n-a\n+\tb\\n\n*** End Patch"
)
CASES: dict[str, tuple[InputGrammar, list[str], list[str]]] = {
    "expression": (InputGrammar("regex", "[ab]{3}|x"), ["aba", "x"], ["ab", "abab", "xa", ""]),
    "anchors": (
        InputGrammar("regex", MOMENT),
        ["2nd at 1AM", "12 at 9PM", "now", "never"],
        ["12 at 9PM.", "now or never", "at"],
    ),
    "any case": (InputGrammar("regex", "(?i)select .+"), ["SELECT 1", "select a"], ["drop a"]),
    "patch": (
        InputGrammar("lark", PATCH),
        [ADDED, UPDATED],
        ["*** Begin Patch\n*** End Patch\n", ADDED + "more", "hello", UPDATED[:-3]],
    ),
    "ignored": (
        InputGrammar("lark", SUM),
        ["1+2", " 1 + 2.5 +\n3 "],
        ["1", "1+2+3+4", "1 2 + 3"],
    ),
    "terminals": (
        InputGrammar("lark", TERMINALS),
        ["-12", "7", "OFF", '"a\\"b"'],
        ["+ 1", "of", '"a', "--1"],
    ),
    "flags": (InputGrammar("lark", r"start: /a.b/s /[x\/]/i"), ["a\nbX", "acb/"], ["ab", "acby"]),
}  # fmt: skip


@pytest.mark.parametrize(("grammar", "texts", "others"), CASES.values(), ids=CASES)
def test_an_input_follows_its_grammar(
    grammar: InputGrammar, texts: list[str], others: list[str]
) -> None:
    (tool,), left_out = with_patterns([Tool("patch", "", SCHEMA, input_grammar=grammar)])
    assert left_out == ()
    rules = rules_of(tool.parameters)
    assert [text for text in texts if not is_value(rules, json.dumps({"input": text}))] == []
    assert [text for text in others if is_value(rules, json.dumps({"input": text}))] == []


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_text_is_a_grammar_or_named(definition: str) -> None:
    with suppress(NoPattern):
        lark_pattern(f"start: {definition}")


def test_strings_have_escapes() -> None:
    rules = rules_of({"type": "string", "pattern": f"^(?:{lark_pattern(ESCAPED)})$"})
    assert is_value(rules, json.dumps('a"b\n\\\\dé', ensure_ascii=False))


def test_a_rule_is_read_once() -> None:
    rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(60)]
    assert lark_pattern("\n".join(["start: a0", *rules, "a60:"])) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coder", "gemma4", "pythonic", "kimi_k2"])
def test_an_input_follows_its_grammar_in_each_format(name: str) -> None:
    walker = walker_of(name)
    grammar = InputGrammar("regex", MOMENT)
    tools, left_out = with_patterns([Tool("wait", "", SCHEMA, input_grammar=grammar)])
    assert left_out == ()
    for seed in range(6):
        text = walker.walk(walker.forced(tools, is_single=True), Random(seed))
        (call,) = walker.read(walker.output_format.forced_opening + text, tools).tool_calls
        assert re.fullmatch(MOMENT, call.arguments["input"])


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ('start: "(" start? ")"', "start refers to itself"),
        ('start: pair{"a"}\npair{x}: x x', "not supported|has parameters"),
        ("start: missing", "missing is not defined"),
        ("start: X\n%import python.X", "%import of python"),
        ("start: X\n%import common.NOTHING", "common.NOTHING does not exist"),
        ("start: X\n%declare X", "%declare is not supported"),
        ('begin: "a"', "start is not defined"),
        ("start: )", "Unexpected token"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deep"),
        ('start: "a"' + " " * 20_000, "more than 20000 characters"),
        ("start: /" + "\\" * 5001, "No terminal matches"),
        ('start: "' + "\\" * 5001, "No terminal matches"),
        ('start: a a a a\na: b b b b b b b b\nb: c c c c c c c c\nc: "' + "x" * 99 + '"', "20000"),
    ],
)
def test_a_grammar_without_expression_is_named(definition: str, reason: str) -> None:
    with pytest.raises(NoPattern, match=reason):
        lark_pattern(definition)
    grammar = InputGrammar("lark", definition)
    tools = [Tool("patch", "", SCHEMA, input_grammar=grammar), Tool("read", "", SCHEMA)]
    assert with_patterns(tools) == (tuple(tools), ("patch/format",))
    assert pattern_of(InputGrammar("gbnf", "root ::= x")) is None
