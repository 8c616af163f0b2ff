"""Output formats derived from templates that no model has, written and read back."""

import json
import re
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.features.formats import derivation
from mlxstack.features.formats.answer_reader import AnswerReader, Calls, read_answer
from mlxstack.features.formats.derivation import derive_format
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls, call_grammar
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.features.formats.syntax import (
    DerivedFormat,
    FormatSource,
    ReasoningMarks,
    call_marks,
    pieces,
)
from mlxstack.text.assembly import assemble_text
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.rendering import asker
from mlxstack.text.rendering.renderers import render_chat
from tests.environment import option
from tests.features.formats.formats import (
    EACH,
    FORMATS,
    Format,
    made_tokenizer,
    respelled,
    template_of,
)
from tests.features.formats.invented import INVENTED
from tests.features.formats.test_forced_tool_call import PERSON, assert_valid, written

TEXT_TYPE = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": TEXT_TYPE,
        "old": TEXT_TYPE,
        "n": {"type": "integer"},
        "all": {"type": "boolean"},
        "lines": {"type": "array"},
        "more": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
    },
}
TOOLS = (Tool("edit", "Edits.", SCHEMA), Tool("now", "Tells."))
CODE = '    if (a < b && c > d) {\n        return "x\\n";\n    }'
ANSWERS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "one": (("edit", {"path": "a.py", "n": 3}),),
    "two": (("edit", {"path": "a.py"}), ("edit", {"old": "b", "all": True})),
    "none": (("now", {}),),
    "code": (("edit", {"path": "a.c", "old": CODE}),),
    "edges": (("edit", {"path": "  two\n", "old": "\n\nlines\n"}),),
    "like JSON": (("edit", {"path": "5", "old": "[1, 2]"}),),
    "the text null": (("edit", {"path": "null", "old": "None"}),),
    "marks": (("edit", {"path": "</parameter>", "old": "<tool_call>\n</tool_call> </think>"}),),
    "types": (("edit", {"all": False, "lines": [1, "2"], "more": {"a": None}, "maybe": None}),),
}
FOLDER = option("FORMATS") or ""


@pytest.fixture(scope="module", params=INVENTED)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return made_tokenizer(INVENTED[request.param])


def said(tokenizer: Any, answer: Message) -> str:
    """The answer as the template writes it after its prompt."""
    prompt_maker = assemble_text(tokenizer).prompt_maker
    talk = (Message(Role.USER, "hi"),)
    prompt = prompt_maker.text(Conversation(talk, TOOLS))
    whole = prompt_maker.text(Conversation((*talk, answer), TOOLS, add_generation_prompt=False))
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("<|im_end|>")


def message(name: str, text: str = "", thought: str | None = None) -> Message:
    calls = (ToolCall(f"callid00{at}", *one) for at, one in enumerate(ANSWERS[name]))
    return Message(Role.ASSISTANT, text, thought, tuple(calls))


@pytest.mark.parametrize("name", ANSWERS)
def test_invented_calls_are_read_as_they_were_written(tokenizer: Any, name: str) -> None:
    found = derive_format(tokenizer)
    assert (found.source, found.problems) == (FormatSource.DERIVED, ())
    for thought in (None, "Let me\nsee."):
        text = said(tokenizer, message(name, "" if thought is None else "So:", thought))
        read = read_answer(found, text, TOOLS)
        assert [(one.name, one.arguments) for one in read.tool_calls] == [*ANSWERS[name]]
        assert (read.reasoning_content, read.n_unparsed) == (thought or "", 0)
        assert read.content.strip() == ("" if thought is None else "So:")


def test_no_mark_of_an_invented_format_is_content(tokenizer: Any) -> None:
    found = derive_format(tokenizer)
    read = read_answer(found, said(tokenizer, message("two", "So:", "Hm.")), TOOLS)
    marks = [one for mark in call_marks(found.calls) for one in pieces(mark) if len(one) > 2]
    assert not [mark for mark in marks if mark in read.content + read.reasoning_content]


def test_a_forced_invented_call_has_valid_arguments(tokenizer: Any) -> None:
    made = OutputFormat(tokenizer)
    tools = (Tool("greet", "", PERSON), Tool("visit", "", PERSON))
    assert made.call_marks is not None
    asked = call_grammar(ForcedCalls(tools, made.call_marks, is_single=True)).text
    rules = GrammarCompiler(tokenizer, len(tokenizer)).compile(asked, "tools")
    assert rules is not None
    for walk in range(5):
        text = made.forced_opening + written(tokenizer, rules, Random(walk))
        read = read_answer(made.description, text, tools)
        assert (read.content, read.n_unparsed) == ("", 0)
        assert_valid(read.tool_calls, tools)


def test_a_call_quoted_in_a_thought_is_not_executed(tokenizer: Any) -> None:
    found = derive_format(tokenizer)
    assert found.reasoning is not None
    call = said(tokenizer, message("one"))
    for mark in found.wrappers:
        # The content of an answer ends its thoughts.
        call = call.replace(mark, "")
    text = f"{found.reasoning.opens}Maybe {call} or not{found.reasoning.closes}No."
    read = read_answer(found, text, TOOLS)
    assert (read.tool_calls, read.content) == ((), "No.")
    assert read.reasoning_content == f"Maybe {call} or not"
    ended = read_answer(found, f"{found.reasoning.opens}Now.{call}", TOOLS)
    assert (len(ended.tool_calls), ended.reasoning_content) == (1, "Now.")


def test_tokens_of_any_width_give_the_same_calls(tokenizer: Any) -> None:
    made = derive_format(tokenizer)
    text = said(tokenizer, message("two", "So:", "Hm."))
    random = Random(1)
    for _ in range(5):
        tokens = respelled(tokenizer, text, lambda: random.choice([1, 2, 5]))
        spelled = "".join(tokenizer.decode([token]) for token in tokens)
        assert spelled == text
        reader = AnswerReader(made, TOOLS)
        spoken = []
        for token in tokens:
            spoken += reader.feed(tokenizer.decode([token]))
        spoken += reader.finish()
        calls = [call for one in spoken if isinstance(one, Calls) for call in one.calls]
        assert [(one.name, one.arguments) for one in calls] == [*ANSWERS["two"]]


def test_a_format_is_derived_once_for_one_template(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of other tests could fill it meanwhile.
    monkeypatch.setattr(derivation, "_known", {})
    again = made_tokenizer(INVENTED["runes"])
    assert derive_format(again) is derive_format(made_tokenizer(INVENTED["runes"]))
    others = {id(derive_format(made_tokenizer(form))) for form in INVENTED.values()}
    assert len(others) == len(INVENTED)
    assert id(derive_format(tokenizer)) in others


def test_a_format_is_derived_where_a_later_turn_changes_the_prompt() -> None:
    """A rule stands beside the last message."""
    form = FORMATS["endless"]
    rule = "{{- 'Rule. ' if loop.last else '' }}{{- '<|im_start|>' + m.role"
    template = template_of(form).replace("{{- '<|im_start|>' + m.role", rule)
    assert template.count(rule) == 1
    calls = derive_format(made_tokenizer(form, template)).calls
    assert calls == derive_format(made_tokenizer(form)).calls
    assert calls is not None and calls.opens == "[TOOL_CALLS]"


def test_instructions_after_the_last_message_are_no_part_of_a_call() -> None:
    form = FORMATS["json"]
    rules = "<|im_start|>system\\n" + "Write calls as you were told. " * 4 + "<|im_end|>"
    opens = "{%- if add_generation_prompt %}"
    template = template_of(form).replace(opens, f"{{{{- '{rules}' }}}}{opens}")
    assert template.count("as you were told") == 4
    plain = derive_format(made_tokenizer(form)).calls
    assert derive_format(made_tokenizer(form, template)).calls == plain


MAX_RENDERINGS = 30
MAX_LETTERS = 50_000


@pytest.mark.parametrize("name", [*FORMATS, *INVENTED])
def test_a_derivation_renders_few_short_probes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def counted(*args: Any, **variables: Any) -> str:
        rendered.append(render_chat(*args, **variables))
        return rendered[-1]

    monkeypatch.setattr(asker, "render_chat", counted)
    monkeypatch.setattr(derivation, "_known", OrderedDict())
    derive_format(made_tokenizer({**FORMATS, **INVENTED}[name]))
    assert 0 < len(rendered) <= MAX_RENDERINGS
    assert sum(map(len, rendered)) <= MAX_LETTERS


def test_a_prompt_may_say_more_before_it_opens_the_answer() -> None:
    form = FORMATS["json"]
    rules = "<|im_start|>system\\n" + "Write calls as you were told. " * 4 + "<|im_end|>"
    opens = "{%- if add_generation_prompt %}"
    template = template_of(form).replace(opens, f"{opens}{{{{- '{rules}' }}}}")
    assert template.count(rules) == 1
    found = derive_format(made_tokenizer(form, template))
    plain = derive_format(made_tokenizer(form))
    assert (found.calls, found.wrappers) == (plain.calls, plain.wrappers)


LATE = Format(
    "{%- if m.content is none %}" + EACH
    + "{{- '<|calls|>' if loop.first else '\\n' }}{{- '<|call|>' + f.name + '<|sep|>' }}"
    "{{- (f.arguments | tojson) + '<|call_end|>' }}"
    "{{- '' if loop.first else '<|calls_end|>' }}{%- endfor %}{%- endif %}",
    special=("<|calls|>", "<|call|>", "<|sep|>", "<|call_end|>", "<|calls_end|>"),
    reminder="<|calls|><|calls_end|>",
)  # fmt: skip


def test_a_section_may_be_closed_after_several_calls_alone() -> None:
    """So write templates of R1, and only beside a content of None."""
    template = template_of(LATE).replace("{{- m.content }}", "{{- m.content or '' }}")
    found = derive_format(made_tokenizer(LATE, template))
    assert found.source == "derived" and found.is_certain and found.calls is not None
    assert (found.calls.section_opens, found.calls.section_closes) == ("<|calls|>", "<|calls_end|>")
    one = '<|call|>edit<|sep|>{"path": "a"}<|call_end|>'
    for calls, n_calls in ((one, 1), (one + one, 2), (f"{one}\n{one}", 2)):
        for end in ("", "<|calls_end|>"):
            read = read_answer(found, f"<|calls|>{calls}{end}", TOOLS)
            assert [call.arguments for call in read.tool_calls] == [{"path": "a"}] * n_calls
            assert (read.content, read.n_unparsed) == ("", 0)


def test_a_prompt_may_open_thoughts_that_no_template_closes() -> None:
    form = FORMATS["json"]
    opens = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n"
    template = template_of(form).replace(opens, f"{opens}MARK")
    assert template.count("MARK") == 1
    found = derive_format(made_tokenizer(form, template.replace("MARK", "<think>")))
    assert found.reasoning == ReasoningMarks("<think>", "</think>")
    other = template.replace("MARK", "<answer></answer><answer>")
    assert derive_format(made_tokenizer(form, other)).reasoning is None


def test_thoughts_may_stand_between_a_prefix_and_a_suffix() -> None:
    found = derive_format(made_tokenizer(Format("", reminder="<|inner_prefix|><|inner_suffix|>")))
    read = read_answer(found, "<|inner_prefix|>Hm.<|inner_suffix|>So.", ())
    assert (read.reasoning_content, read.content) == ("Hm.", "So.")


def test_a_family_may_be_told_by_the_marks_of_a_published_parser() -> None:
    # The template names its tools between marks, and writes no calls.
    found = derive_format(made_tokenizer(Format("", reminder="<|tool_list_start|>")))
    assert (found.name, found.source) == ("pythonic", FormatSource.FAMILY)
    raw = "<|tool_call_start|>[edit(old='it's \"a\"')]<|tool_call_end|>"
    (call,) = read_answer(found, raw, (Tool("edit"),)).tool_calls
    assert call.arguments == {"old": 'it\'s "a"'}


def test_a_format_is_derived_where_contents_are_lists_of_parts() -> None:
    form = FORMATS["json"]
    template = template_of(form).replace("m.content", "(m.content | map(attribute='text') | join)")
    assert derive_format(made_tokenizer(form, template)) == derive_format(made_tokenizer(form))


@pytest.mark.skipif(not FOLDER, reason="MLX_STACK_FORMATS names no folder of published templates")
@pytest.mark.slow
def test_published_templates_are_derived_and_read_back() -> None:
    """The raw answers of published templates mean what their publishers' tests say."""
    folder = Path(FOLDER)
    cases = json.loads((folder / "cases.json").read_text())
    n_right = n_all = 0
    for case in cases:
        if case["skip"] or case["is_partial"] or case["continue_final_message"]:
            continue
        template = (folder / "models/templates" / case["template"]).read_text()
        form = Format("", special=tuple(sorted(_marks(template))))
        tools = tuple(
            Tool(one["name"], one.get("description") or "", one.get("parameters") or {})
            for one in case["tools"]
        )
        found = derive_format(made_tokenizer(form, template))
        read = read_answer(found, case["raw_output"], tools, is_in_thinking=_opens(found, case))
        wanted = [(one["name"], one["arguments"]) for one in case["expected"]["tool_calls"]]
        n_all += 1
        n_right += [(one.name, one.arguments) for one in read.tool_calls] == wanted
    assert n_right > 0.95 * n_all


def _marks(template: str) -> set[str]:
    return set(
        re.findall(r"<\|[^\s<>|{}]{1,40}\|>|<｜[^｜<>{}]{1,40}｜>|\[/?[A-Z_]{3,30}\]", template)
    )


def _opens(found: DerivedFormat, case: dict[str, Any]) -> bool:
    """Whether the prompt of a case opened a thought that its answer closes."""
    if found.reasoning is None:
        return False
    opens = found.reasoning.opens
    closes = found.reasoning.closes
    raw = case["raw_output"]
    return closes in raw and (not opens or opens not in raw[: raw.find(closes)])
