"""Guided answers of a model that writes every message behind a header (GPT-OSS)."""

from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role, Tool
from mlxstack.core.preset import ModelSpec, Preset
from mlxstack.features.formats.families import HARMONY
from mlxstack.features.formats.grammar.constraint import GrammarConstraint
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.text_assembly import assemble_text_processor
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from tests.patience import wait_until

CITY = ResponseConstraint(schema={"type": "object", "properties": {"city": {"enum": ["Ulm"]}}})
BASH = Tool("bash", "Run a command.")


async def guide_of(
    text_processor: TextProcessor, *turns: Message, **more: Any
) -> GrammarConstraint:
    conversation = Conversation(turns or (Message(Role.USER, "go"),), **more)
    prompt = await text_processor.prompt(conversation)
    options = GenerationOptions("a-1", response_format=CITY)
    constraint = await text_processor.constraints.of_answer(options, conversation, prompt)
    assert constraint.grammar is not None
    return constraint.grammar


def made(tokenizer: Any) -> TextProcessor:
    return assemble_text_processor(tokenizer, Preset(model=ModelSpec(id="tiny")), len(tokenizer))


def is_allowed(text_processor: TextProcessor, guide: GrammarConstraint, text: str) -> bool:
    """Whether an answer may begin with this text, token by token."""
    walk = guide.start()
    for token in text_processor.tokenizer.encode(text, add_special_tokens=False):
        mask = walk.mask()
        if mask is not None and not mask[token // 8] >> token % 8 & 1:
            return False
        walk.advance(token)
    return True


def test_the_table_of_the_vocabulary_is_made_before_the_first_grammar(harmony: Any) -> None:
    text_processor = made(harmony)
    assert (
        wait_until(lambda: text_processor.constraints._grammars._vocabulary_table)
        is text_processor.constraints._grammars.load()
    )


CALL_OPENING = "<|channel|>commentary to=functions."
THOUGHT = "<|channel|>analysis<|message|>hm"
JSON = '{"city": "Ulm"}'


async def test_thinking_off_begins_with_the_answer(harmony: Any) -> None:
    text_processor = made(harmony)
    guide = await guide_of(text_processor, thinking=False)
    assert is_allowed(text_processor, guide, HARMONY.answer + JSON)
    assert not is_allowed(text_processor, guide, THOUGHT)
    assert not is_allowed(text_processor, guide, CALL_OPENING)
    assert not is_allowed(text_processor, guide, HARMONY.answer + "Ulm")


async def test_thinking_off_with_tools_begins_with_the_answer_or_a_call(harmony: Any) -> None:
    text_processor = made(harmony)
    guide = await guide_of(text_processor, thinking=False, tools=(BASH,))
    assert is_allowed(text_processor, guide, HARMONY.answer + JSON)
    assert is_allowed(text_processor, guide, CALL_OPENING + "bash <|constrain|>json<|message|>{}")
    assert not is_allowed(text_processor, guide, THOUGHT)


@pytest.mark.parametrize("thinking", [None, True])
async def test_a_thought_may_come_first_by_default(harmony: Any, thinking: bool | None) -> None:
    text_processor = made(harmony)
    guide = await guide_of(text_processor, thinking=thinking)
    assert is_allowed(
        text_processor, guide, f"{THOUGHT}<|end|><|start|>assistant{HARMONY.answer}{JSON}"
    )


async def test_the_grammar_begins_at_once_after_a_prefill(harmony: Any) -> None:
    text_processor = made(harmony)
    turns = (Message(Role.USER, "go"), Message(Role.ASSISTANT, "As JSON:"))
    guide = await guide_of(text_processor, *turns, continue_final=True)
    assert is_allowed(text_processor, guide, JSON)
    assert not is_allowed(text_processor, guide, "Ulm")
