"""Whatever a client sends as items and tools is read, or refused in words."""

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstack.api.dialects.openai_responses.encrypted_reasoning import (
    decode_reasoning,
    encode_reasoning,
)
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import (
    ADDED,
    ANSWER_PARTS,
    QUESTION_PARTS,
    READERS,
    conversation,
)
from mlxstack.api.dialects.openai_responses.tool_names import toolbox
from mlxstack.api.tool_choice import tool_choice_mode
from mlxstack.core.conversation import Role
from mlxstack.core.errors import BadRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["input_text", "output_text", "refusal", "input_image", "new"])
        | JSON
    },
    optional={"text": st.text(max_size=4) | JSON},
)
CONTENT = st.text(max_size=4) | st.lists(PARTS | st.text(max_size=4), max_size=2) | JSON
TOOLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search", "tool_search"])},
    optional={
        "name": st.text(max_size=4) | JSON,
        "tools": JSON,
        "format": JSON,
        "parameters": JSON,
        "execution": st.sampled_from(["client", "server"]) | JSON,
    },
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from([*READERS, *QUESTION_PARTS, *ANSWER_PARTS, ADDED, "of_the_future"])},
    optional={
        "text": st.text(max_size=4) | JSON,
        "refusal": st.text(max_size=4) | JSON,
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        "content": CONTENT,
        "output": CONTENT,
        "call_id": st.text(max_size=4) | JSON,
        "name": st.text(max_size=4) | JSON,
        "namespace": st.text(max_size=4) | JSON,
        "arguments": st.text(max_size=4) | JSON,
        "input": JSON,
        "action": JSON,
        "author": JSON,
        "tools": st.lists(TOOLS, max_size=2) | JSON,
        "encrypted_content": st.text(max_size=9).map("mlx-stack:".__add__) | JSON,
    },
)


@settings(max_examples=300)
@given(
    items=st.lists(ITEMS | st.fixed_dictionaries({"type": JSON}), max_size=5),
    tools=st.lists(TOOLS, max_size=3),
    text=JSON,
)
def test_any_items_are_read_or_refused(items: list[Any], tools: list[Any], text: Any) -> None:
    raw = msgspec.json.encode({"input": items, "tools": tools, "text": {"format": text}})
    try:
        body = msgspec.json.decode(raw, type=ResponsesBody)
        made = conversation(body, toolbox(body))
    except (BadRequest, msgspec.ValidationError) as error:
        assert str(error)
        return
    assistants = [message.role is Role.ASSISTANT for message in made.messages]
    assert (True, True) not in pairwise(assistants), "one turn each"
    assert len({tool.name for tool in made.tools}) == len(made.tools)


@given(choice=JSON | st.fixed_dictionaries({"type": JSON, "mode": JSON}))
def test_any_tool_choice_is_read_or_refused(choice: Any) -> None:
    if isinstance(choice, str | dict | None):
        try:
            tool_choice_mode(choice)
        except BadRequest as error:
            assert error.param == "tool_choice"


@given(thoughts=st.text())
def test_sealed_thoughts_open_again(thoughts: str) -> None:
    assert decode_reasoning(encode_reasoning(thoughts)) == thoughts


@given(foreign=st.text() | st.text().map("mlx-stack:".__add__))
def test_foreign_seals_stay_closed(foreign: str) -> None:
    assert decode_reasoning(None) == ""
    assert isinstance(decode_reasoning(foreign), str)
