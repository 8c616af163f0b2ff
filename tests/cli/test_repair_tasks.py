"""Repairs of `verify --tools --repairs`: tasks, limited tests, the agent and its comparison."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlxstack.cli.verification.tools.chat_server import ChatAnswer, ChatServer, OutOfTime
from mlxstack.cli.verification.tools.comparison import first_difference
from mlxstack.cli.verification.tools.limited_test import run_test
from mlxstack.cli.verification.tools.repair_agent import MAX_TURNS, RepairResult, RepairTurn, repair
from mlxstack.cli.verification.tools.repair_tasks import REPAIRS, RepairTask
from mlxstack.core.errors import Broken

Message = dict[str, Any]
TASK = REPAIRS[0]


@contextmanager
def scripted(messages: Sequence[Message]) -> Iterator[tuple[ChatServer, list[Any]]]:
    """A server that gives these answers, the last one again and again; and its requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = messages[min(len(requests), len(messages)) - 1]
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            body = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
            self.send_response(200 if message else 500)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with ChatServer(f"http://127.0.0.1:{server.server_port}", "tiny") as client:
                yield client, requests
        finally:
            server.shutdown()
            thread.join()


def calling(name: str, **arguments: Any) -> Message:
    """An answer with one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": f"call-{name}", "function": function}]}


def repairing(task: RepairTask) -> Message:
    """The call that repairs a task."""
    change = task.repair
    return calling("edit", path=change.path, old=change.old, new=change.new)


@pytest.mark.parametrize("task", REPAIRS, ids=lambda task: task.name)
def test_a_task_fails_until_it_is_repaired(task: RepairTask) -> None:
    assert not run_test(task.files, task.test).has_passed
    with scripted([repairing(task)]) as (server, _):
        assert repair(server, task).is_solved


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "may not use socket"),
        ("import subprocess\nsubprocess.run(['true'])", "may not use subprocess"),
        ("open('../outside', 'w')", "may write in its folder alone"),
        ("import os\nos.remove('/etc/hostname')", "may write in its folder alone"),
        ("text = 'x' * (1 << 31)", "MemoryError"),
        ("while True: pass", "did not end within"),
        ("import os\nassert 'HOME' in os.environ", "AssertionError"),
    ],
)
def test_a_test_is_limited(code: str, reason: str) -> None:
    outcome = run_test({}, code, timeout_s=0.7 if "while" in code else 20.0)
    assert not outcome.has_passed
    assert reason in outcome.output


def test_the_agent_lists_reads_and_edits_until_the_test_passes() -> None:
    script = [
        calling("list"),
        calling("read", path="total.py"),
        calling("open", path="total.py"),
        calling("read", file="total.py"),
        calling("edit", path="total.py", old="no such text", new=""),
        repairing(TASK),
    ]
    with scripted(script) as (server, requests):
        result = repair(server, TASK)
    assert (result.is_solved, result.n_turns, result.n_prompt, result.n_generated) == (
        True, 6, 60, 12,
    )  # fmt: skip
    results = [made.results[0] for made in result.turns]
    assert results[0] == "total.py" and results[1] == TASK.files["total.py"]
    assert "no tool open" in results[2] and "not the arguments" in results[3]
    assert "0 times" in results[4] and "is changed" in results[5]
    assert requests[0]["temperature"] == 0
    assert requests[1]["messages"][-1] == {
        "role": "tool", "tool_call_id": "call-list", "content": "total.py",
    }  # fmt: skip


def test_an_answer_without_a_call_gets_the_failing_test_until_the_turns_are_spent() -> None:
    with scripted([{"content": "It is repaired."}]) as (server, requests):
        result = repair(server, TASK)
    assert (result.is_solved, result.n_turns) == (False, MAX_TURNS)
    assert "expected 6" in requests[-1]["messages"][-1]["content"]


def test_a_run_without_time_or_a_broken_server_ends() -> None:
    with scripted([calling("list")]) as (server, requests):
        server.deadline = 0.0
        with pytest.raises(OutOfTime):
            server.ask([], [], 1)
        assert not repair(server, TASK).is_complete and not requests
    with scripted([{}]) as (server, _), pytest.raises(Broken):
        server.ask([], [], 1)


def result_of(message: Message, n_prompt: int = 10) -> RepairResult:
    """A repair of one answer."""
    answer = RepairTurn(ChatAnswer(message, "stop", n_prompt, 1))
    return RepairResult(TASK.name, False, 1, n_prompt, 1, (answer,))


CALL = calling("read", path="total.py")
DESCRIBED = {
    "content": '{"name": "read", "arguments": {"path": "total.py"}, "description": "Read."}'
}
FENCED = {"content": '```json\n{"name": "read", "arguments": {"path": "total.py"}}\n```'}


@pytest.mark.parametrize(
    ("theirs", "n_prompt", "reason"),
    [
        (CALL, 10, None),
        (FENCED, 10, "the same text is 1 calls here, and 0 there"),
        (DESCRIBED, 10, "the same text is 1 calls here, and 0 there"),
        (FENCED, 12, "the prompts differ: 10 tokens, theirs 12"),
        (calling("list"), 10, "other tokens after prompts of the same length"),
    ],
)
def test_the_first_difference_has_a_reason(
    theirs: Message, n_prompt: int, reason: str | None
) -> None:
    difference = first_difference(result_of(CALL), result_of(theirs, n_prompt))
    assert (difference and difference.reason) == reason
