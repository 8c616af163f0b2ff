"""Pairs tool results with calls: one order and one prompt for any order of arrival.

Many templates print no call ids, so that the model reads the results in the order of the calls.
"""

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from mlxstack.core.conversation import Message, Role, ToolCall

INTERRUPTED = "The call was interrupted; it has no result."


def interrupted(call: ToolCall) -> Message:
    """Result of a call that has none."""
    return Message(Role.TOOL, INTERRUPTED, tool_call_id=call.id, name=call.name)


def pair_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with the results of each turn in the order of its calls.

    A result belongs to the first open call of its turn with its id; one without an id to the first
    with its name, else to the first. A skipped call gets a result that says so; results without
    a call come last. Calls without an id get one by their position. Results keep the places of
    results, so that texts between them stay. Idempotent, and stable when messages follow.
    """
    paired: list[list[Message]] = []
    names: dict[str, str] = {}
    calls: list[ToolCall] = []
    places: list[int] = []
    n_calls = 0
    before: Role | None = None
    for sent in messages:
        message = sent
        if message.role is Role.ASSISTANT:
            if before is not Role.ASSISTANT:
                _place(paired, places, calls, names)
                calls, places = [], []
            message = _with_ids(sent, n_calls)
            n_calls += len(message.tool_calls)
            calls += message.tool_calls
            names |= {call.id: call.name for call in message.tool_calls}
        elif message.role is Role.TOOL:
            places.append(len(paired))
        paired.append([message])
        before = message.role
    _place(paired, places, calls, names)
    return tuple(message for group in paired for message in group)


def _with_ids(message: Message, n_before: int) -> Message:
    if all(call.id for call in message.tool_calls):
        return message
    calls = (
        call if call.id else replace(call, id=f"call_{at}")
        for at, call in enumerate(message.tool_calls, n_before)
    )
    return replace(message, tool_calls=tuple(calls))


def _place(
    paired: list[list[Message]],
    places: Sequence[int],
    calls: Sequence[ToolCall],
    names: dict[str, str],
) -> None:
    """Put the results of one turn at `places`, in the order of its calls."""
    results = [paired[place][0] for place in places]
    answers = _answers(calls, results)
    answered = set(answers.values())
    groups: list[list[Message]] = [[]]
    for at in range(max(answers, default=-1) + 1):
        if at in answers:
            groups[-1].append(_named(results[answers[at]], calls[at]))
            groups.append([])
        else:
            groups[-1].append(interrupted(calls[at]))
    rest = [[_known(one, names)] for at, one in enumerate(results) if at not in answered]
    for place, group in zip(places, [*groups[:-1], *rest], strict=True):
        paired[place] = group


def _answers(calls: Sequence[ToolCall], results: Sequence[Message]) -> dict[int, int]:
    """Index of the result of each call that has one, by index of the call."""
    by_id: dict[str, deque[int]] = {}
    by_name: dict[str | None, deque[int]] = {}
    for at, result in enumerate(results):
        if result.tool_call_id:
            by_id.setdefault(result.tool_call_id, deque()).append(at)
        else:
            by_name.setdefault(result.name, deque()).append(at)
    answers: dict[int, int] = {}
    for at, call in enumerate(calls):
        if waiting := by_id.get(call.id):
            answers[at] = waiting.popleft()
    for at, call in enumerate(calls):
        if at not in answers and (waiting := by_name.get(call.name)):
            answers[at] = waiting.popleft()
    others = deque(sorted(at for waiting in by_name.values() for at in waiting))
    for at in range(len(calls)):
        if at not in answers and others:
            answers[at] = others.popleft()
    return answers


def _named(result: Message, call: ToolCall) -> Message:
    return replace(result, tool_call_id=call.id, name=result.name or call.name)


def _known(result: Message, names: dict[str, str]) -> Message:
    """A result without a call of its turn, named after an earlier call of its id."""
    name = result.name or names.get(result.tool_call_id or "")
    return replace(result, name=name)
