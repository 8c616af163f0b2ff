"""First answers that differ between two servers, with the reason."""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from mlxstack.cli.verification.tools.repair_agent import RepairResult

MAX_TEXT = 300
"""Characters of an answer that are printed."""
CALL_KEYS = {"name", "arguments"}


class FirstDifference(Struct, frozen=True):
    """First answers of a repair that differ."""

    repair: str
    number: int
    """Number of the answer, from 1."""
    reason: str
    ours: str
    theirs: str


class RepairComparison(Struct, frozen=True):
    """Repairs of another server, and what differs."""

    server: str
    repairs: tuple[RepairResult, ...]
    differences: tuple[FirstDifference, ...]
    error: str = ""
    """Reason why its repairs are missing."""


def first_difference(ours: RepairResult, theirs: RepairResult) -> FirstDifference | None:
    """First answers that differ; None if none do."""
    for number, (our_turn, their_turn) in enumerate(
        zip(ours.turns, theirs.turns, strict=False), start=1
    ):
        our_message = our_turn.answer.message
        their_message = their_turn.answer.message
        if _parts(our_message) == _parts(their_message):
            continue
        n_ours = our_turn.answer.n_prompt
        n_theirs = their_turn.answer.n_prompt
        if n_ours != n_theirs:
            reason = f"the prompts differ: {n_ours} tokens, theirs {n_theirs}"
        elif _is_read_otherwise(our_message, their_message):
            reason = _reading(our_message, their_message)
        else:
            reason = "other tokens after prompts of the same length"
        return FirstDifference(ours.name, number, reason, _text(our_message), _text(their_message))
    return None


def _is_read_otherwise(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both wrote the same, which only one reads."""
    if _written(ours) == _written(theirs):
        return True
    calls = _written_calls(ours)
    return bool(calls) and calls == _written_calls(theirs)


def _written_calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Calls of an answer, or those in its text."""
    content, calls = _parts(message)
    if calls:
        return list(calls)
    objects = [found for found in _objects(content) if isinstance(found, dict)]
    return [(found["name"], found["arguments"]) for found in objects if found.keys() >= CALL_KEYS]


def _reading(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return f"the same text is {len(_calls(ours))} calls here, and {len(_calls(theirs))} there"


def _calls(message: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return message.get("tool_calls") or ()


def _parts(message: dict[str, Any]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Text and calls of an answer, whatever its ids and spaces."""
    calls = tuple(
        (call["function"]["name"], _value(call["function"].get("arguments")))
        for call in _calls(message)
    )
    return (message.get("content") or "").strip(), calls


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (TypeError, ValueError):
        return arguments


def _written(message: dict[str, Any]) -> list[str]:
    """Values of all JSON in an answer, calls included."""
    content, calls = _parts(message)
    leaves = [*map(str, _values(_objects(content)))]
    for name, arguments in calls:
        leaves += [name, *map(str, _values(arguments))]
    return leaves


def _objects(text: str) -> list[Any]:
    """JSON objects in a text."""
    objects = []
    decoder = json.JSONDecoder(strict=False)
    start = text.find("{")
    while start >= 0:
        try:
            read, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            objects.append(read)
        start = text.find("{", end)
    return objects


def _values(tree: Any) -> list[Any]:
    """Leaves of JSON."""
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in _values(branch)]
    if isinstance(tree, list):
        return [leaf for branch in tree for leaf in _values(branch)]
    return [tree]


def _text(message: dict[str, Any]) -> str:
    calls = [
        f"{call['function']['name']}({call['function'].get('arguments')})"
        for call in _calls(message)
    ]
    return " ".join(filter(None, (message.get("content") or "", *calls)))[:MAX_TEXT]
