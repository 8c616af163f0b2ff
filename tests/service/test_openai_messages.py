"""Stored messages come back as they were, and files to be warmed are read as requests are."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, Damaged
from mlxstack.service.parts.openai_messages import (
    ChatMessageParam,
    read_messages,
    read_stored,
    write_message,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
CALL = st.builds(
    ToolCall,
    TEXT.filter(bool),
    TEXT,
    st.dictionaries(TEXT, st.integers() | TEXT | st.none(), max_size=3) | st.just("not JSON {"),
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(Role),
    TEXT | st.just("x-anthropic-billing-header: a=b;\nRules."),
    reasoning=st.none() | TEXT,
    tool_calls=st.lists(CALL, max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
)


@given(MESSAGES)
def test_a_stored_message_comes_back_unchanged(message: Message) -> None:
    assert read_stored(write_message(message)) == message


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"role": "alien"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": 7}]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": [3]},
    ],
)
def test_a_stored_message_that_cannot_be_read_is_damaged(stored: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="cannot be read"):
        read_stored(stored)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "of_the_future"}],
         "[image omitted]"),
        ([{"type": "text", "text": "a"}, {"type": "of_the_future", "text": "b"}], "a\nb"),
        ([{"type": "file", "name": "a"}, {"type": "directory", "name": "b"}], "JSON"),
        ([{"type": "file", "name": "a"}], "JSON"),
        ([{"text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"text": "b", "score": 1}], "a\nb"),
        ([{"city": "Rome"}], "JSON"),
        ([{"type": "text", "text": "a"}, None], "JSON"),
        (["a", "b"], "a\nb"),
        ([], "JSON"),
    ],
)  # fmt: skip
def test_a_list_with_a_known_part_is_parts_and_another_one_is_json(
    sent: list[Any], text: str
) -> None:
    (read,) = read_messages([ChatMessageParam("tool", sent, tool_call_id="c")])
    assert read.text == (json.dumps(sent) if text == "JSON" else text)


def test_only_the_latest_question_is_refused_for_an_image() -> None:
    image: list[Any] = [{"type": "image_url"}, {"type": "text", "text": "what is it"}]
    earlier = ChatMessageParam("user", image)
    first, _ = read_messages([earlier, ChatMessageParam("user", "and now")])
    assert first.text == "[image omitted]\nwhat is it"
    with pytest.raises(BadRequest) as refused:
        read_messages([earlier])
    assert refused.value.param == "messages[0].content"


THOUGHTS: list[dict[str, Any]] = [
    {"content": "hi", "reasoning_content": "hm"},
    {"content": "hi", "reasoning": "hm"},
    {
        "content": "hi",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    },
    {"content": "hi", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    {
        "content": "hi",
        "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"text": "hm"}],
    },
    {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "hi"]},
    {"content": [{"type": "reasoning", "text": "hm"}, "hi"]},
]


@pytest.mark.parametrize("sent", THOUGHTS)
def test_reasoning_of_a_history_is_read_in_every_spelling(sent: dict[str, Any]) -> None:
    """Between the calls of one task a model needs it; LiteLLM, OpenRouter and Mistral have own."""
    sent = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}], **sent}
    (message,) = read_messages([msgspec.convert(sent, ChatMessageParam)])
    assert (message.reasoning, message.text) == ("hm", "hi")
    assert [call.name for call in message.tool_calls] == ["f"]
