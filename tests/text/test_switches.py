"""Variables that switch thoughts, under names that no published template uses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.prompt import PromptMaker
from mlxstack.text.template.switches import nearest
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded

USER = Role.USER
ASSISTANT = Role.ASSISTANT
Load = Callable[..., PromptMaker]
TURNS = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.reasoning_content and (KEEPS or loop.index0 > ns.last) %}
{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
{{- m.content }}{%- for call in m.tool_calls or [] %}{{- call | tojson }}{%- endfor %}
{{- '</' + m.role + '>' }}
{%- endfor %}
"""
OPENING = "{%- if add_generation_prompt %}{{- '<assistant>' }}{{- MODE }}{%- endif %}"
MODES = {
    "musing": "'<think>' if musing_enabled_think else '<think></think>'",
    "no_reasoning": "'<think></think>' if no_reasoning else '<think>'",
    "words": "'<think>' if think_style != 'off' else '<think></think>'",
    "budget": "'<think></think>' if thought_budget == 0 else '<think>'",
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The prompts of a template with two of its expressions filled in."""

    def made(keeps: str = "false", mode: str = "''", **more: Any) -> PromptMaker:
        template = TURNS.replace("KEEPS", keeps) + OPENING.replace("MODE", mode)
        tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
        return assemble_text(
            loaded(tmp_path, tokenizer, template, {"eos_token": "<|im_end|>"}), **more
        ).prompt_maker

    return made


OLD = (
    Message(USER, "go"),
    Message(ASSISTANT, "Done.", reasoning="a thought"),
    Message(USER, "more"),
)


@pytest.mark.parametrize(
    ("keeps", "kept", "dropped"),
    [
        ("retain_musings", True, False),
        ("not (forget_thoughts | default(true))", False, True),
        ("history_of_thought == 'all'", "all", "last"),
    ],
)
def test_thoughts_stay_where_a_switch_keeps_them(
    load: Load, keeps: str, kept: Any, dropped: Any
) -> None:
    name = next(w for w in keeps.replace("(", " ").split() if "_" in w)
    prompt_maker = load(keeps)
    assert prompt_maker.template.switches.keep == {name: kept}
    assert "a thought" in prompt_maker.text(Conversation(OLD))
    asked = Conversation(OLD, template={name: dropped})
    assert "a thought" not in prompt_maker.text(asked)
    assert "a thought" not in load(keeps, template_kwargs={name: dropped}).text(Conversation(OLD))


def test_a_switch_that_changes_more_than_thoughts_stays_off(load: Load) -> None:
    prompt_maker = load("is_training", mode="'training' if is_training else ''")
    assert prompt_maker.template.switches.keep == {}


def test_a_template_that_keeps_thoughts_needs_no_switch(load: Load) -> None:
    assert load("not forget").template.switches.keep == {}


@pytest.mark.parametrize("name", MODES)
def test_thinking_reaches_the_variable_that_the_template_reads(load: Load, name: str) -> None:
    prompt_maker = load(mode=MODES[name])
    said = {
        thinking: prompt_maker.text(Conversation(OLD[:1], thinking=thinking))
        for thinking in (True, False)
    }
    assert said[True].endswith("<assistant><think>")
    assert said[False].endswith("<assistant><think></think>")


@pytest.mark.parametrize(
    ("wanted", "given"), [("minimal", "low"), ("low", "low"), ("medium", "high"), ("xhigh", "high")]
)
def test_an_unknown_level_of_effort_is_the_nearest_known_one(
    load: Load, wanted: str, given: str
) -> None:
    mode = (
        "raise_exception('low or high') if effort_of_thought is defined and "
        "effort_of_thought not in ['low', 'high'] else (effort_of_thought | default('low'))"
    )
    text = load(mode=mode).text(Conversation(OLD[:1], template={"reasoning_effort": wanted}))
    assert text.endswith(f"<assistant>{given}")


def test_a_level_that_a_template_only_quotes_is_a_common_one(load: Load) -> None:
    mode = "'effort ' + (reasoning_effort | default('medium'))"
    for wanted, given in (("minimal", "low"), ("medium", "medium"), ("max", "high")):
        text = load(mode=mode).text(Conversation(OLD[:1], template={"reasoning_effort": wanted}))
        assert text.endswith(f"<assistant>effort {given}")


def test_a_level_that_nobody_knows_is_left_to_the_template() -> None:
    assert nearest("of my own", ("low", "high")) == "of my own"
    assert nearest("medium", ()) == "medium"


def test_a_template_that_reads_the_switch_lets_a_model_think_by_default(tmp_path: Path) -> None:
    """Also one whose marks of thoughts are no tokens."""
    template = TURNS.replace("KEEPS", "false") + OPENING.replace(
        "MODE", "'<muse>' if enable_thinking else ''"
    )
    made = loaded(tmp_path, byte_level(CHATML_SPECIAL, []), template, {"eos_token": "<|im_end|>"})
    assert not made.has_thinking
    assert (
        assemble_text(made).prompt_maker.text(Conversation(OLD[:1])).endswith("<assistant><muse>")
    )
    assert (
        assemble_text(made, False).prompt_maker.text(Conversation(OLD[:1])).endswith("<assistant>")
    )
