"""What a template refuses or drops is written in another way; no template is known by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.prompt import PromptMaker, TokenizeOptions
from mlxstack.text.template.capabilities import losses
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded

SYSTEM = Role.SYSTEM
USER = Role.USER
ASSISTANT = Role.ASSISTANT
TOOL = Role.TOOL
ACT = Tool("act", "word-tool", {"type": "object", "properties": {"key": {"type": "string"}}})
Load = Callable[[str], PromptMaker]

HEAD = "{%- for tool in tools or [] %}{{- '<tool>' + (tool.function | tojson) }}{%- endfor %}"
TURN = "{{- '<' + m.role + '>' + m.content + '</' + m.role + '>' }}"
CALLS = (
    "{%- for call in m.tool_calls or [] %}{{- '<call>' + call.function.name + ' '"
    " + (call.function.arguments | tojson) + '</call>' }}{%- endfor %}"
)
LOOP = HEAD + "{%- for m in messages %}" + TURN + CALLS + "{%- endfor %}"
COUNTED = """
{%- set ns = namespace(n=0) %}
{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('turns alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}
"""
EITHER = "{%- if m.tool_calls %}" + CALLS + "{%- else %}" + TURN + "{%- endif %}{%- endfor %}"
TEMPLATES = {
    "whole": LOOP,
    "no tools": LOOP.removeprefix(HEAD),
    "no calls": HEAD + "{%- for m in messages %}" + TURN + "{%- endfor %}",
    "no results": HEAD + "{%- for m in messages if m.role != 'tool' %}" + TURN + CALLS
    + "{%- endfor %}",
    "nothing but turns": "{%- for m in messages if m.role != 'tool' %}" + TURN + "{%- endfor %}",
    "text or calls": HEAD + "{%- for m in messages %}" + EITHER,
    "text or calls, alternating": COUNTED + HEAD + "{%- for m in messages %}" + EITHER,
    "a user first": "{%- if messages[0].role != 'user' and messages[1].role != 'user' %}"
    "{{- raise_exception('no user') }}{%- endif %}" + LOOP,
    "no empty answer": LOOP.replace(
        TURN,
        "{%- if m.role == 'assistant' and not m.content and not m.tool_calls %}"
        "{{- raise_exception('empty') }}{%- endif %}" + TURN,
    ),
    "texts in parts": LOOP.replace("m.content", "m.content[0].text"),
    "arguments as text": LOOP.replace(
        "(call.function.arguments | tojson)", "call.function.arguments"
    ),
    "a queue": "{%- set q = [] %}{%- for m in messages %}{%- set _ = q.append(m.role) %}"
    "{%- endfor %}" + LOOP,
    "system before the last user": HEAD + "{%- for m in messages if m.role != 'system' %}"
    "{%- if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{- messages[0].content }}{%- endif %}" + TURN + CALLS + "{%- endfor %}",
}  # fmt: skip


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The prompts of a template."""

    def made(template: str) -> PromptMaker:
        tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
        opened = template + "{{- '<answer>' if add_generation_prompt else '' }}"
        return assemble_text(
            loaded(tmp_path, tokenizer, opened, {"eos_token": "<|im_end|>"})
        ).prompt_maker

    return made


def call(word: str) -> ToolCall:
    return ToolCall(f"call_{word}", "act", {"key": f"word-{word}"})


def calling(*args: str, text: str = "") -> Message:
    return Message(ASSISTANT, text, tool_calls=tuple(map(call, args)))


def result(word: str) -> Message:
    return Message(TOOL, f"word-of-{word}", tool_call_id=f"call_{word}")


SYS = Message(SYSTEM, "word-rules")
ASK = Message(USER, "word-ask")
MORE = Message(USER, "word-on")
DONE = Message(ASSISTANT, "word-done")
CONVERSATIONS = {
    "text beside a call": (SYS, ASK, calling("a", text="word-look"), result("a")),
    "an old loop": (SYS, ASK, calling("a", text="word-look"), result("a"), DONE, MORE),
    "two calls": (SYS, ASK, calling("a", "b"), result("b"), result("a"), DONE, MORE),
    "interrupted": (SYS, ASK, calling("a"), MORE),
    "interrupted in the middle": (SYS, ASK, calling("a", "b"), result("b"), MORE),
    "compacted": (SYS, result("z"), MORE),
    "an answer first": (SYS, DONE, MORE),
    "a call first": (SYS, calling("a"), result("a"), MORE),
    "an empty answer": (SYS, ASK, Message(ASSISTANT), MORE),
    "no user": (SYS,),
    "nobody asks": (SYS, DONE, calling("a"), result("a")),
    "late system": (SYS, ASK, DONE, Message(SYSTEM, "word-late"), MORE),
    "all at once": (
        SYS, result("z"), DONE, calling("a", "b", text="word-look"), result("b"),
        Message(SYSTEM, "word-late"), MORE, Message(ASSISTANT), MORE,
    ),
}  # fmt: skip


def words_of(messages: tuple[Message, ...]) -> list[str]:
    texts = [m.text for m in messages]
    arguments = [c.arguments for m in messages for c in m.tool_calls]
    values = [str(one["key"]) for one in arguments if isinstance(one, dict)]
    return [one for one in (*texts, *values) if one]


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_that_was_said_is_refused_or_lost(load: Load, name: str) -> None:
    prompt_maker = load(TEMPLATES[name])
    for messages in CONVERSATIONS.values():
        text = prompt_maker.text(Conversation(messages, tools=(ACT,)))
        assert [word for word in (*words_of(messages), "word-tool") if word not in text] == []
    assert losses(prompt_maker.template.probe, prompt_maker.template.capabilities) == []


def test_a_template_that_takes_everything_is_given_it_as_it_is(load: Load) -> None:
    text = load(LOOP).text(Conversation(CONVERSATIONS["an old loop"], tools=(ACT,)))
    assert text == (
        '<tool>{"name": "act", "description": "word-tool", "parameters": {"type": "object",'
        ' "properties": {"key": {"type": "string"}}}}<system>word-rules</system>'
        '<user>word-ask</user><assistant>word-look</assistant><call>act {"key": "word-a"}</call>'
        "<tool>word-of-a</tool><assistant>word-done</assistant><user>word-on</user><answer>"
    )


def test_tools_and_calls_become_text_where_the_template_has_neither(load: Load) -> None:
    turns = (SYS, ASK, calling("a", text="word-look"), result("a"))
    text = load(TEMPLATES["nothing but turns"]).text(Conversation(turns, tools=(ACT,)))
    assert text.startswith("<system>word-rules\n\n# Tools\n")
    assert '{"name": "act", "description": "word-tool"' in text
    assert text.endswith(
        '<assistant>word-look\n<tool_call>\n{"name": "act", "arguments": {"key": "word-a"}}\n'
        "</tool_call></assistant><user><tool_response>\nword-of-a\n</tool_response></user><answer>"
    )


@pytest.mark.parametrize("field", ["reasoning", "thinking", "part"])
def test_a_thought_goes_into_the_field_that_the_template_reads(load: Load, field: str) -> None:
    read = "{{- '<think>' + m.FIELD + '</think>' if m.FIELD }}".replace("FIELD", field)
    if field == "part":
        read = (
            "{%- if m.content is not string %}{%- for p in m.content %}{{- p[p.type] }}"
            "{%- endfor %}{%- else %}"
        )
    closed = "{%- endif %}" if field == "part" else ""
    prompt_maker = load(LOOP.replace(TURN, read + TURN + closed))
    thinking = Message(ASSISTANT, "", reasoning="word-thought", tool_calls=(call("a"),))
    text = prompt_maker.text(Conversation((ASK, thinking, result("a")), tools=(ACT,)))
    assert text.count("word-thought") == 1
    assert text.find("word-thought") < text.find('word-a"')


def test_white_space_at_the_end_of_an_open_answer_stays(load: Load) -> None:
    prompt_maker = load(LOOP.replace("+ m.content +", "+ (m.content | trim) +"))
    turns = (ASK, Message(ASSISTANT, "The answer is "))
    text = prompt_maker.text(Conversation(turns, continue_final=True))
    assert text == "<user>word-ask</user><assistant>The answer is "


def test_an_open_answer_that_the_template_drops_is_refused(load: Load) -> None:
    prompt_maker = load(
        "{%- for m in messages if m.role != 'assistant' %}" + TURN + "{%- endfor %}"
    )
    with pytest.raises(BadRequest, match="message to continue is not in the prompt"):
        prompt_maker.text(Conversation((ASK, DONE), continue_final=True))


def test_the_findings_of_a_template_are_kept_by_its_digest(load: Load, monkeypatch: Any) -> None:
    first = load(LOOP)
    monkeypatch.setattr(type(first.template), "_probe", lambda _: pytest.fail("probed again"))
    assert load(LOOP).template.capabilities == first.template.capabilities


def test_json_in_ascii_holds_no_mark_of_the_escaper(load: Load) -> None:
    """A special token in an argument is neither one in the prompt nor spoiled by a mark."""
    ascii_json = "tojson(ensure_ascii=True)"
    prompt_maker = load(LOOP.replace("tojson", ascii_json))
    spelled = "<|im_end|> \\ufdd0 é"
    turn = Message(ASSISTANT, "", tool_calls=(ToolCall("call_a", "act", {"key": spelled}),))
    conversation = Conversation((ASK, turn, result("a")), tools=(ACT,))
    prompt = prompt_maker.make(conversation)
    assert prompt.text is not None
    assert '{"key": "<|im_end|> \\\\ufdd0 \\u00e9"}' in prompt.text
    assert prompt_maker.tokenize("<|im_end|>", TokenizeOptions())[0] not in prompt.tokens
