"""Minimal coding agent: lists, reads and edits until a test passes."""

import json
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlxstack.cli.verification.tools.chat_server import ChatAnswer, ChatServer, OutOfTime
from mlxstack.cli.verification.tools.limited_test import TestOutcome, run_test
from mlxstack.cli.verification.tools.repair_tasks import RepairTask

MAX_TURNS = 8
"""Answers of the model for one repair."""
MAX_ANSWER = 256
"""Tokens of an answer; the longest of the files has 60."""
SYSTEM = (
    "You repair small Python projects. Use the tools to read files and to edit them. "
    "Reply without a tool call only when the repair is complete."
)


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {
        key: {"type": "string", "description": about} for key, about in parameters.items()
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(parameters),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("list", "List the files."),
    _tool("read", "Read a file.", path="Name of the file."),
    _tool(
        "edit",
        "Replace a text in a file.",
        path="Name of the file.",
        old="Text to replace, exactly as it stands in the file.",
        new="Text to put in its place.",
    ),
)
NAMES = tuple(tool["function"]["name"] for tool in TOOLS)


class RepairTurn(Struct, frozen=True):
    """Answer of the model, and results of its calls."""

    answer: ChatAnswer
    results: tuple[str, ...] = ()


class RepairResult(Struct, frozen=True):
    """Outcome of a repair, and its turns."""

    name: str
    is_solved: bool
    n_turns: int
    n_prompt: int
    """Prompt tokens of all turns, reused ones included."""
    n_generated: int
    turns: tuple[RepairTurn, ...] = ()
    is_complete: bool = True
    """False where the time of the run was over first."""


def repair(server: ChatServer, task: RepairTask) -> RepairResult:
    """Let a model repair a fault. Raises Broken for a failing server."""
    files = dict(task.files)
    output = run_test(files, task.test).output
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"The test fails:\n\n{output}\n\nRepair {task.repair.path}."},
    ]
    turns: list[RepairTurn] = []
    outcome = TestOutcome(has_passed=False, output="")
    is_complete = True
    while len(turns) < MAX_TURNS and not outcome.has_passed:
        try:
            answer = server.ask(messages, TOOLS, MAX_ANSWER)
        except OutOfTime:
            is_complete = False
            break
        messages.append(answer.message)
        results = [_run(call, files) for call in answer.message.get("tool_calls") or ()]
        turns.append(RepairTurn(answer, tuple(results)))
        messages += [
            {"role": "tool", "tool_call_id": call.get("id"), "content": result}
            for call, result in zip(answer.message.get("tool_calls") or (), results, strict=True)
        ]
        outcome = run_test(files, task.test)
        if not results:
            messages.append({"role": "user", "content": f"The test fails:\n\n{outcome.output}"})
    return RepairResult(
        name=task.name,
        is_solved=outcome.has_passed,
        n_turns=len(turns),
        n_prompt=sum(exchange.answer.n_prompt for exchange in turns),
        n_generated=sum(exchange.answer.n_generated for exchange in turns),
        turns=tuple(turns),
        is_complete=is_complete,
    )


def _run(call: dict[str, Any], files: dict[str, str]) -> str:
    """Result of a call for the model, errors included."""
    function = call.get("function") or {}
    run = ACTIONS.get(function.get("name"))
    if run is None:
        return f"error: there is no tool {function.get('name')}; the tools are {', '.join(NAMES)}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
        texts = {key: str(value) for key, value in arguments.items()}
    except (ValueError, AttributeError):
        return "error: the arguments are no JSON object"
    try:
        return run(files, **texts)
    except TypeError:
        return f"error: these are not the arguments of {function['name']}"


def _list(files: dict[str, str]) -> str:
    return "\n".join(files)


def _read(files: dict[str, str], path: str) -> str:
    return files.get(path) or f"error: there is no file {path}; the files are {', '.join(files)}"


def _edit(files: dict[str, str], path: str, old: str, new: str) -> str:
    text = files.get(path)
    if text is None:
        return _read(files, path)
    if not old or text.count(old) != 1:
        return f"error: `old` stands {text.count(old) if old else 0} times in {path}"
    files[path] = text.replace(old, new)
    return f"{path} is changed"


ACTIONS: dict[Any, Callable[..., str]] = {"list": _list, "read": _read, "edit": _edit}
