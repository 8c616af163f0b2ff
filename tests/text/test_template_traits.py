"""Templates that refuse, or drop without a word, what others render."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.prompt import PromptMaker
from tests.features.formats.formats import EACH, FORMATS, made_tokenizer, template_of
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded

SYSTEM = Role.SYSTEM
USER = Role.USER
ASSISTANT = Role.ASSISTANT
TOOL = Role.TOOL
BASH = Tool("bash", "Run a command.", {"type": "object", "properties": {"c": {"type": "string"}}})
Load = Callable[[str], PromptMaker]

# The form of GPT-OSS: one call per turn, text or thought beside it, neither before an answer.
ONE_CALL = """
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- set ns = namespace(answered=false) %}
{%- for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and 'tool_calls' not in later %}
{%- set ns.answered = true %}{%- endif %}
{%- endfor %}
{%- if m.content and m.thinking %}{{- raise_exception('text and thought beside a call') }}
{%- elif not ns.answered and (m.content or m.thinking) %}
{{- '<analysis>' + (m.content or m.thinking) + '</analysis>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<call>' + call.name + (call.arguments | tojson) + '</call>' }}
{%- elif m.role == 'tool' %}{{- '<result>' + m.content + '</result>' }}
{%- elif m.role == 'assistant' %}{{- '<final>' + m.content + '</final>' }}
{%- else %}{{- '<' + m.role + '>' + m.content + '</' + m.role + '>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<answer>' }}{%- endif %}
"""
# The form of Llama 3: a second call in one turn is refused.
STRICT_ONE_CALL = ONE_CALL.replace(
    "{%- set call =",
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}"
    "{%- set call =",
)
# The form of GPT-OSS and MiniMax: a result needs a call before it.
CALL_FIRST = ONE_CALL.replace(
    "{%- elif m.role == 'tool' %}",
    "{%- elif m.role == 'tool' and (loop.first or not (loop.previtem.tool_calls "
    "or loop.previtem.role == 'tool')) %}{{- raise_exception('no call') }}"
    "{%- elif m.role == 'tool' %}",
)
# The form of Gemma 4: the results of a call come before the text beside it.
LATE_TEXT = """
{%- for m in messages %}
{%- if m.role != 'tool' %}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}
{%- endfor %}
{%- if m.tool_calls %}
{%- for later in messages[loop.index:] if later.role == 'tool' %}
{{- '<result>' + later.content + '</result>' }}{%- endfor %}
{%- endif %}
{{- '<' + m.role + '>' + m.content + '</' + m.role + '>' if m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<answer>' }}{%- endif %}
"""
TURNS = """
{%- for m in messages %}{{- '<' + m.role + '>' + m.content + '</' + m.role + '>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<answer>' }}{%- endif %}
"""
# The form of Mistral Small 3.2: a system message is rendered anywhere, but counts as a turn.
ALTERNATING = (
    """
{%- for m in messages %}
{%- if loop.index0 > 1 and m.role != 'user' and loop.previtem.role == 'assistant' %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- endfor %}
"""
    + TURNS
)
# The form of Seed-OSS: the keys of a schema are read without a check.
UNCHECKED = (
    """
{%- for tool in tools or [] %}
{{- 'def ' + tool.function.name + '(' }}
{%- for key, one in tool.function.parameters.properties.items() %}
{{- key + ': ' + one.description + (' required' if key in tool.function.parameters.required
    else '') + ', ' }}
{%- endfor %}{{- ')' }}
{%- endfor %}
"""
    + TURNS
)
# The form of Hermes: no check whether there are tools at all, and a macro that follows references.
RECURSIVE = (
    """
{%- macro type_of(schema) %}
{%- if schema.type is string %}{{- schema.type }}{%- else %}{{- type_of(schema) }}{%- endif %}
{%- endmacro %}
{%- for tool in tools %}
{{- tool.function.name }}
{%- for key, one in tool.function.parameters.properties | items %}
{{- key + ': ' + type_of(one) }}
{%- endfor %}
{%- endfor %}
"""
    + TURNS
)

# The form of Command R+: objects have a type of their values, and all properties a description.
DESCRIBED = (
    """
{%- macro type_of(schema) %}
{%- if schema.type == 'object' %}{{- 'Dict[' + type_of(schema.additionalProperties) + ']' }}
{%- else %}{{- schema.type }}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
{{- tool.function.name }}
{%- for key, one in tool.function.parameters.properties | items %}
{{- key + ': ' + type_of(one) + one.description }}
{%- endfor %}
{%- endfor %}
"""
    + TURNS
)

# The form of GigaChat: a key of a property may be absent, and is not null.
SPLIT = (
    """
{%- for tool in tools or [] %}
{{- tool.function.name }}
{%- for key, one in (tool.function.parameters.properties or {}) | items %}
{{- key + ': ' + (one.description.split() | join('_') if 'description' in one else '-') }}
{%- endfor %}
{%- endfor %}
"""
    + TURNS
)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The prompts of a template."""

    def made(template: str) -> PromptMaker:
        tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
        return assemble_text(
            loaded(tmp_path, tokenizer, template, {"eos_token": "<|im_end|>"})
        ).prompt_maker

    return made


def calling(text: str, thought: str | None, *numbers: int) -> Message:
    calls = tuple(ToolCall(f"call_{n}", "bash", {"c": f"argument {n}"}) for n in numbers)
    return Message(ASSISTANT, text, reasoning=thought, tool_calls=calls)


def result(number: int) -> Message:
    return Message(TOOL, f"result {number}", tool_call_id=f"call_{number}")


def prompt(prompt_maker: PromptMaker, *turns: Message, tools: tuple[Tool, ...] = ()) -> str:
    return prompt_maker.text(Conversation((Message(USER, "go"), *turns), tools=tools))


def test_text_beside_a_call_ends_the_thought_where_both_are_refused(load: Load) -> None:
    text = prompt(load(ONE_CALL), calling("I look.", "Hm.", 1), result(1))
    assert text == (
        "<user>go</user><analysis>Hm.\n\nI look.</analysis>"
        '<call>bash{"c": "argument 1"}</call><result>result 1</result><answer>'
    )


def test_text_beside_an_old_call_is_a_turn_of_its_own_where_thoughts_are_dropped(
    load: Load,
) -> None:
    prompt_maker = load(ONE_CALL)
    turns = (calling("I look.", "Hm.", 1), result(1), Message(ASSISTANT, "Done."))
    text = prompt(
        prompt_maker, *turns, Message(USER, "more"), calling("Again.", "So.", 2), result(2)
    )
    assert text == (
        '<user>go</user><final>I look.</final><call>bash{"c": "argument 1"}</call>'
        "<result>result 1</result><final>Done.</final><user>more</user>"
        '<analysis>So.\n\nAgain.</analysis><call>bash{"c": "argument 2"}</call>'
        "<result>result 2</result><answer>"
    )


def test_text_beside_a_call_comes_before_it_where_the_template_writes_it_after_the_result(
    load: Load,
) -> None:
    assert prompt(load(LATE_TEXT), calling("I look.", None, 1), result(1)) == (
        '<user>go</user><assistant>I look.</assistant><call>bash{"c": "argument 1"}</call>'
        "<result>result 1</result><answer>"
    )


@pytest.mark.parametrize("template", [ONE_CALL, STRICT_ONE_CALL], ids=["dropped", "refused"])
def test_parallel_calls_are_turns_of_their_own_where_one_is_the_limit(
    load: Load, template: str
) -> None:
    turns = (calling("", "Hm.", 1, 2), result(2), result(1), Message(USER, "next"))
    assert prompt(load(template), *turns) == (
        "<user>go</user><analysis>Hm.</analysis>"
        '<call>bash{"c": "argument 1"}</call><result>result 1</result>'
        '<call>bash{"c": "argument 2"}</call><result>result 2</result>'
        "<user>next</user><answer>"
    )


def test_a_result_of_no_call_stays_after_parallel_calls(load: Load) -> None:
    turns = (calling("", None, 1, 2), result(1), result(3))
    assert prompt(load(ONE_CALL), *turns).endswith(
        '<result>result 1</result><call>bash{"c": "argument 2"}</call>'
        "<result>result 3</result><answer>"
    )


def test_a_result_of_no_call_is_quoted_where_the_template_refuses_it(load: Load) -> None:
    prompt_maker = load(CALL_FIRST)
    quoted = "<user><tool-result>\nresult 1\n</tool-result></user>"
    text = prompt(prompt_maker, result(1), Message(ASSISTANT, "Done."), Message(USER, "more"))
    assert text == f"<user>go</user>{quoted}<final>Done.</final><user>more</user><answer>"
    text = prompt(prompt_maker, calling("", None, 1), result(1), result(2), Message(USER, "more"))
    assert "tool-result" not in text
    assert text.endswith("<result>result 2</result><user>more</user><answer>")


def test_a_late_system_message_is_quoted_where_it_breaks_the_alternation(load: Load) -> None:
    turns = (Message(ASSISTANT, "Yes."), Message(SYSTEM, "be short"), Message(USER, "more"))
    text = prompt(load(ALTERNATING), *turns)
    assert text.endswith(
        "<assistant>Yes.</assistant><user><system-reminder>\nbe short\n</system-reminder>"
        "\n\nmore</user><answer>"
    )


@pytest.mark.parametrize(
    "parameters",
    [{}, {"type": "object"}, {"type": "object", "properties": {"c": {"type": "string"}}}],
)
def test_keys_of_a_schema_are_added_where_the_template_reads_them_unchecked(
    load: Load, parameters: dict[str, Any]
) -> None:
    keys = "".join(f"{key}: , " for key in parameters.get("properties", {}))
    text = prompt(load(UNCHECKED), tools=(Tool("now", "", parameters),))
    assert text == f"def now({keys})<user>go</user><answer>"


def test_no_key_of_a_schema_is_added_where_none_is_needed(load: Load) -> None:
    tools = "{{- tools[0].function.parameters | tojson if tools else '' }}" + TURNS
    assert prompt(load(tools), tools=(Tool("now"),)) == "{}<user>go</user><answer>"


def test_a_template_that_loops_over_no_tools_gets_an_empty_list(load: Load) -> None:
    prompt_maker = load(RECURSIVE)
    assert prompt(prompt_maker, tools=()) == "<user>go</user><answer>"
    assert prompt(prompt_maker, tools=(BASH,)) == "bashc: string<user>go</user><answer>"
    assert prompt_maker.make(
        Conversation((Message(USER, "go"),), tools=(BASH,))
    ).checkpoint_positions


def test_endless_recursion_of_a_template_is_a_refusal(load: Load) -> None:
    endless = (
        "{%- macro f(x) %}{{- f(x) }}{%- endmacro %}{{- f(1) if 'loop' in messages[-1].content }}"
    )
    with pytest.raises(BadRequest, match="refuses the conversation"):
        prompt(load(endless + TURNS), Message(ASSISTANT, "loop"))


def test_a_template_that_raises_is_quoted(load: Load) -> None:
    joke = "{{- raise_exception('no jokes here') if 'joke' in messages[-1].content }}"
    with pytest.raises(BadRequest, match="refuses the conversation: no jokes here"):
        prompt(load(joke + TURNS), Message(USER, "a joke, please"))


def test_a_macro_that_needs_types_gets_them(load: Load) -> None:
    vague = Tool("now", "", {"properties": {"a": {"anyOf": []}, "b": {"$ref": "#/$defs/c"}},
                             "$defs": {"c": {"type": ["null", "integer"]}}})  # fmt: skip
    assert prompt(load(RECURSIVE), tools=(vague,)) == (
        "nowa: stringb: integer<user>go</user><answer>"
    )


def test_a_template_may_need_descriptions_and_types_of_values(load: Load) -> None:
    properties = {"plain": {"type": "object"}, "known": {"$ref": "#/$defs/known"}}
    known = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = Tool("act", "", {"properties": properties, "$defs": {"known": known}})
    text = prompt(load(DESCRIBED), tools=(tool,))
    assert "plain: Dict[string]" in text and "known: Dict[string]" in text


def test_null_keys_and_bare_schemas_are_read_where_the_template_refuses_them(load: Load) -> None:
    properties = {"a": {"description": None}, "b": True, "c": {"description": "A text"}}
    prompt_maker = load(SPLIT)
    text = prompt(prompt_maker, tools=(Tool("now", "", {"properties": properties}),))
    assert text == "nowa: b: c: A_text<user>go</user><answer>"
    plain = Tool("now", "", {"properties": {"a": {}}})
    assert prompt(prompt_maker, tools=(plain,)) == "nowa: -<user>go</user><answer>"


def test_a_template_may_join_defaults_to_texts(load: Load) -> None:
    joined = (
        "{%- for t in tools or [] %}{%- for k, p in t.function.parameters.properties.items() %}"
        "{{- k + (' = ' + p.default if p.enum and p.default is defined else '') + ' ' }}"
        "{%- endfor %}{%- endfor %}"
    )
    properties = {"a": {"enum": ["x"], "default": None}, "b": {"enum": [1, 2], "default": 1}}
    tool = Tool("now", "", {"properties": {**properties, "c": {"enum": ["y"], "default": "y"}}})
    text = prompt(load(joined + TURNS), tools=(tool,))
    assert text == "a = null b = 1 c = y <user>go</user><answer>"


def test_types_that_json_does_not_have_end_no_template(load: Load) -> None:
    tool = Tool("now", "", {"properties": {"a": {"type": "any"}, "b": {"type": "float"}}})
    text = prompt(load(RECURSIVE), tools=(tool,))
    assert text == "nowa: stringb: string<user>go</user><answer>"


def test_calls_that_a_template_writes_beside_tools_alone_are_text_without_them() -> None:
    form = FORMATS["json"]
    template = template_of(form).replace(
        EACH, "{%- for c in (m.tool_calls or [] if tools else []) %}{%- set f = c.function %}"
    )
    prompts = assemble_text(made_tokenizer(form, template)).prompt_maker
    tools = (Tool("act", "Acts.", {"type": "object", "properties": {"key": {"type": "string"}}}),)
    call = Message(Role.ASSISTANT, "", tool_calls=(ToolCall("callid001", "act", {"key": "v"}),))
    talk = (Message(Role.USER, "hi"), call, Message(Role.TOOL, "r", tool_call_id="callid001"))
    plain = assemble_text(made_tokenizer(form)).prompt_maker.text(Conversation(talk, tools))
    assert prompts.text(Conversation(talk, tools)) == plain
    assert '{"name": "act", "arguments": {"key": "v"}}' in prompts.text(Conversation(talk))


ITEM = {"type": "object", "properties": {"size": {"type": "integer"}}}
# The form of gpt-oss: types and descriptions, and no definitions.
TYPED = (
    """{%- macro kind(p) %}
{%- if p.type == 'object' %}{
{%- for k, one in (p.properties or {}).items() %}{{- k + ': ' }}{{- kind(one) }};
{{- ' // ' + one.description if one.description }}{% endfor %}}
{%- elif p.type == 'array' %}{{- kind(p['items'] or {}) }}[]
{%- else %}{{- p.type or 'any' }}{% endif %}{% endmacro %}
{%- for t in tools or [] %}{{- kind(t.function.parameters) }}{% endfor %}"""
    + TURNS
)


def test_what_references_mean_is_written_where_the_template_drops_it(load: Load) -> None:
    properties = {
        "one": {"$ref": "#/$defs/item"},
        "some": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}], "default": None},
        "other": {"type": ["string", "null"]},
        "tree": {"$ref": "#/$defs/tree"},
    }
    tree = {"type": "object", "properties": {"in": {"$ref": "#/$defs/tree"}}}
    tool = Tool(
        "put",
        parameters={"$defs": {"item": ITEM, "tree": tree}, "type": "object",
                    "properties": properties},
    )  # fmt: skip
    text = prompt(load(TYPED), tools=(tool,))
    item = "{size: integer;}"
    assert text == (
        f"{{one: {item};some: {item}[];maybe: {item};other: ['string', 'null'];"
        "tree: {in: any;};}<user>go</user><answer>"
    )
    dumped = "{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}" + TURNS
    assert '{"$ref": "#/$defs/item"}' in prompt(load(dumped), tools=(tool,))


def test_a_schema_of_many_levels_ends_no_prompt(load: Load) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(sys.getrecursionlimit() // 2):
        schema = {"type": "object", "properties": {"in": schema}}
    assert "<user>go</user>" in prompt(load(TYPED), tools=(Tool("put", parameters=schema),))
