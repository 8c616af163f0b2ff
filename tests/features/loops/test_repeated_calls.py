"""The same call with the same result, again and again."""

import pytest

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.loops import RepeatedCall
from mlxstack.features.loops.repeated_calls import repeated_call


def reading(n: int, path: str = "a.py", result: str = "x = 1", text: str = "") -> list[Message]:
    """A turn that reads a file."""
    call = ToolCall(f"call_{n}", "read_file", {"path": path})
    return [
        Message(Role.ASSISTANT, text, tool_calls=(call,)),
        Message(Role.TOOL, result, tool_call_id=f"call_{n}"),
    ]


ASKED = Message(Role.USER, "Fix it")


def test_the_third_time_is_named() -> None:
    messages = [ASKED, *reading(0), *reading(1), *reading(2, text="Once more.")]
    assert repeated_call(messages) == RepeatedCall("read_file", 3)
    assert repeated_call(messages[:-2]) is None
    assert repeated_call([*messages, *reading(3)]) == RepeatedCall("read_file", 4)


@pytest.mark.parametrize(
    "last", [reading(2, path="b.py"), reading(2, result="x = 2"), [ASKED], reading(2)[:1]]
)
def test_another_call_or_result_is_none(last: list[Message]) -> None:
    assert repeated_call([ASKED, *reading(0), *reading(1), *last]) is None


def test_calls_side_by_side_count_together() -> None:
    calls = tuple(ToolCall(f"call_{i}", name, {}) for i, name in enumerate(("ls", "pwd")))
    results = [Message(Role.TOOL, "same", tool_call_id=call.id) for call in calls]
    together = [Message(Role.ASSISTANT, tool_calls=calls), *results]
    assert repeated_call(together * 3) == RepeatedCall("ls, pwd", 3)
    assert repeated_call(together) is None


def test_a_remark_after_the_result_changes_nothing() -> None:
    messages = [*reading(0), ASKED, *reading(1), *reading(2), ASKED]
    assert repeated_call(messages) == RepeatedCall("read_file", 3)


def test_a_conversation_without_calls_has_none() -> None:
    assert repeated_call([]) is None
    assert repeated_call([ASKED] * 5) is None
