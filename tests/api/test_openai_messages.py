"""OpenAI's chat messages in the spellings of clients."""

import json
from typing import Any

import msgspec
import pytest

from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam, read_messages
from mlxstack.core.errors import BadRequest


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
