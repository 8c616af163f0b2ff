"""Calls that an agent repeats although their results stay the same."""

from collections.abc import Sequence
from itertools import takewhile

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.loops import RepeatedCall

MIN_TIMES = 3

CallResult = tuple[str, object, str]
"""Name and arguments of a call, and the text of its result."""


def repeated_call(messages: Sequence[Message]) -> RepeatedCall | None:
    """The calls of the last turns, equal three times with equal results.

    What was said between them does not count.
    """
    if not messages or all(message.role is not Role.TOOL for message in messages[-MIN_TIMES:]):
        return None
    rounds = _rounds(messages)
    if not rounds:
        return None
    n_times = sum(1 for _ in takewhile(lambda results: results == rounds[-1], reversed(rounds)))
    if n_times < MIN_TIMES:
        return None
    return RepeatedCall(", ".join(name for name, _, _ in rounds[-1]), n_times)


def _rounds(messages: Sequence[Message]) -> list[list[CallResult]]:
    """Calls with results of each turn that has some, in their order."""
    rounds: list[list[CallResult]] = []
    calls: dict[str, ToolCall] = {}
    for message in messages:
        if message.tool_calls:
            calls = {call.id: call for call in message.tool_calls}
            rounds.append([])
        call = calls.pop(message.tool_call_id or "", None)
        if message.role is Role.TOOL and call is not None:
            rounds[-1].append((call.name, call.arguments, message.text))
    return [results for results in rounds if results]
