"""Checks one answer against the calls that were asked for."""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from jsonschema import Draft202012Validator
from msgspec import Struct

from mlxstack.cli.verification.tools.call_tasks import CallKind, CallTask, ExpectedCall
from mlxstack.cli.verification.tools.chat_server import ChatAnswer

MIN_COPIES = 3
MIN_LOOP = 24
"""Least characters that repeat at the end of a loop."""
MAX_PERIOD = 400
UNREAD = re.compile(r'"(?:name|arguments|parameters)"\s*:|<tool_call>|<function')
"""Parts of a call in a text that was not read as one."""


class CallOutcome(StrEnum):
    """Outcome of one request."""

    VALID = "valid"
    """All calls are of offered tools, and fit their schemas."""
    NO_CALL = "no call"
    UNREAD = "a call that the server does not read"
    TOO_FEW = "fewer calls than asked for"
    OTHER_TOOL = "a tool that was not offered"
    NOT_JSON = "arguments that are cut, or no JSON object"
    NOT_SCHEMA = "arguments that do not fit the schema"
    FAILED = "the server failed"
    NOT_MADE = "no time left"


class CallCheck(Struct, frozen=True):
    """Outcome, and the text or the calls that it is about."""

    kind: CallKind
    outcome: CallOutcome
    detail: str = ""
    is_exact: bool = False
    """The calls are those that were asked for, value by value."""
    is_loop: bool = False
    """A repetition ended it, or it was cut in one."""
    n_generated: int = 0


def check(task: CallTask, answer: ChatAnswer) -> CallCheck:
    """Check the calls of an answer."""
    calls = answer.message.get("tool_calls") or []
    content = answer.message.get("content") or ""
    outcome, detail = _outcome(task, calls, content)
    is_exact = outcome is CallOutcome.VALID and _read(calls) == list(task.expected)
    if outcome is CallOutcome.VALID and not is_exact:
        detail = _written(calls)
    written = content + "".join(call["function"].get("arguments") or "" for call in calls)
    return CallCheck(
        kind=task.kind,
        outcome=outcome,
        detail=detail,
        is_exact=is_exact,
        is_loop=answer.has_loop or (answer.finish_reason == "length" and repeats(written)),
        n_generated=answer.n_generated,
    )


def repeats(text: str) -> bool:
    """Whether a text ends with copies of one piece."""
    end = text[-MAX_PERIOD * MIN_COPIES :]
    for period in range(1, len(end) // MIN_COPIES + 1):
        n_copies = max(MIN_COPIES, -(-MIN_LOOP // period))
        if len(end) >= n_copies * period and end.endswith(end[-period:] * n_copies):
            return True
    return False


def _outcome(
    task: CallTask, calls: Sequence[dict[str, Any]], content: str
) -> tuple[CallOutcome, str]:
    if not calls:
        is_unread = UNREAD.search(content) is not None
        return CallOutcome.UNREAD if is_unread else CallOutcome.NO_CALL, content
    offered = {offer["function"]["name"]: offer["function"]["parameters"] for offer in task.tools}
    for call in calls:
        name = call["function"]["name"]
        if name not in offered:
            return CallOutcome.OTHER_TOOL, name
        arguments = _arguments(call)
        if not isinstance(arguments, dict):
            return CallOutcome.NOT_JSON, str(call["function"].get("arguments"))
        fault = next(Draft202012Validator(offered[name]).iter_errors(arguments), None)
        if fault is not None:
            return CallOutcome.NOT_SCHEMA, f"{fault.json_path}: {fault.message}"
    if len(calls) < len(task.expected):
        return CallOutcome.TOO_FEW, f"{len(calls)} of {len(task.expected)}"
    return CallOutcome.VALID, ""


def _read(calls: Sequence[dict[str, Any]]) -> list[ExpectedCall]:
    return [ExpectedCall(call["function"]["name"], _arguments(call)) for call in calls]


def _written(calls: Sequence[dict[str, Any]]) -> str:
    """Calls that are others than those that were asked for."""
    functions = [call["function"] for call in calls]
    return " ".join(f"{called['name']}({called.get('arguments')})" for called in functions)


def _arguments(call: dict[str, Any]) -> Any:
    """Arguments of a call; None for no JSON."""
    try:
        return json.loads(call["function"].get("arguments") or "{}")
    except ValueError:
        return None
