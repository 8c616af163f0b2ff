"""A last message of the assistant that no template opening could follow is continued."""

from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.text.assembly import assemble_text
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded

USER = Role.USER
ASSISTANT = Role.ASSISTANT
UNOPENED = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'assistant' -%}{{ m.content }}<|im_end|>
{%- else -%}[SYS]{{ m.content }}[/SYS]{%- endif -%}
{%- endfor -%}
"""
COUNT = (Message(USER, "Count"), Message(ASSISTANT, "one, two, "))


@pytest.fixture
def unopened(tmp_path: Path) -> Any:
    tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
    return loaded(tmp_path, tokenizer, UNOPENED, {"eos_token": "<|im_end|>"})


def test_a_template_without_an_opening_continues_the_last_answer(unopened: Any) -> None:
    prompt_maker = assemble_text(unopened).prompt_maker
    prompt = prompt_maker.make(Conversation(COUNT))
    assert prompt.text == prompt_maker.text(Conversation(COUNT)) == "[INST]Count[/INST]one, two, "
    assert prompt.before == prompt.tokens[-len(prompt.before) :] != ()
    assert prompt.tokens == prompt_maker.make(Conversation(COUNT, continue_final=True)).tokens


def test_mistral_continues_the_last_answer(mistral: Any) -> None:
    text = assemble_text(mistral).prompt_maker.make(Conversation(COUNT)).text
    assert text is not None and text.endswith("[/INST]one, two, ")


def test_an_earlier_answer_keeps_its_end(unopened: Any) -> None:
    text = assemble_text(unopened).prompt_maker.text(Conversation((*COUNT, Message(USER, "Go on"))))
    assert text == "[INST]Count[/INST]one, two, <|im_end|>[INST]Go on[/INST]"


@pytest.mark.parametrize(
    "last", [Message(ASSISTANT), Message(ASSISTANT, "x", tool_calls=(ToolCall("c", "f", {}),))]
)
def test_an_answer_without_text_or_with_calls_is_not_continued(
    unopened: Any, last: Message
) -> None:
    assert not assemble_text(unopened).prompt_maker.make(Conversation((COUNT[0], last))).before


def test_without_a_generation_prompt_the_conversation_is_rendered_closed(unopened: Any) -> None:
    closed = Conversation(COUNT, add_generation_prompt=False)
    assert assemble_text(unopened).prompt_maker.text(closed).endswith("two, <|im_end|>")


def test_a_template_with_an_opening_begins_another_answer(chatml: Any) -> None:
    prompt = assemble_text(chatml).prompt_maker.make(Conversation(COUNT))
    assert not prompt.before
    assert "one, two, <|im_end|>" in (prompt.text or "")
