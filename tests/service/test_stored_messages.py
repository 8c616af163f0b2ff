"""Stored messages come back as they were."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import Damaged
from mlxstack.service.parts.stored_messages import read_stored, write_message

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
