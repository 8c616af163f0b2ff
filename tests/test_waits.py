"""Tests wait for facts, with the one limit of `tests.patience`; sleeps and clocks are counted."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROGRAMS = {"endurance", "fuzz", "matrix", "mutants", "pages"}
"""Rooms of programs that run for a given time; no test is in them."""
MIN_LIMIT_S = 5.0
"""A literal limit from here on is the patience of a wait; below, it is part of the scene."""
LIMITS = {"timeout", "patience_s"}
POSITIONS = {"timeout": 0, "wait": 0, "result": 0, "join": 0, "exception": 0, "wait_for": 1}
"""Where a call of this name takes its limit."""
SLEEPS = {"time.sleep", "asyncio.sleep"}
CLOCKS = {"time.monotonic", "time.perf_counter", "time.time", "loop.time"}

COUNTED = {
    "api/running.py": 1,
    "api/test_agent_turns.py": 1,
    "api/test_disk_room.py": 1,
    "api/test_idle_unload.py": 1,
    "api/test_llama_server.py": 2,
    "api/test_swap_limits.py": 2,
    "bench/test_stream_client.py": 2,
    "cli/pseudo_terminal.py": 2,
    "cli/test_client.py": 2,
    "cli/test_hosts.py": 1,
    "cli/test_output.py": 1,
    "cli/test_pull.py": 1,
    "clients/real_agents.py": 2,
    "clients/relay.py": 1,
    "engine/harness.py": 4,
    "engine/test_disk_bounds.py": 1,
    "engine/test_engine_loop.py": 2,
    "engine/test_retention.py": 1,
    "engine/test_write_queue.py": 1,
    "features/heads/measure.py": 3,
    "gateway/test_idle.py": 1,
    "host/worker.py": 2,
    "mac/test_sleep.py": 1,
    "service/test_request_stream.py": 2,
    "service/test_work_threads.py": 1,
    "store/test_disk_quota.py": 1,
    "store/test_files.py": 1,
    "store/test_gc.py": 1,
    "tui/browser.py": 2,
    "tui/test_command.py": 2,
    "tui/test_live.py": 6,
    "tui/test_values_agree.py": 1,
}
"""Sleeps and looks at a clock by file, which make no test fail on a busy machine.

They are in servers of the tests, pace what they send, or bound from below. The counts only fall:
give a new test a fact to wait for instead.
"""


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def constants(tree: ast.Module) -> dict[str, float]:
    """Numbers that the module gives a name."""
    return {
        ast.unparse(statement.targets[0]): seconds(statement.value, {})
        for statement in tree.body
        if isinstance(statement, ast.Assign)
    }


def seconds(node: ast.expr, named: dict[str, float]) -> float:
    """A literal number or one with a name; zero for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return named.get(ast.unparse(node), 0.0)


def limits(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls with a literal limit of a wait."""
    named = constants(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if called(node) == "pytest.mark.timeout":
                continue
            position = POSITIONS.get(called(node).rpartition(".")[2])
            values = [keyword.value for keyword in node.keywords if keyword.arg in LIMITS]
            values += node.args[position : position + 1] if position is not None else []
            if any(seconds(value, named) >= MIN_LIMIT_S for value in values):
                yield node


def timed(tree: ast.AST) -> Iterator[ast.Call]:
    """Sleeps, and looks at a clock; a sleep of zero only lets others run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_pause = called(node) in SLEEPS and not (
                isinstance(node.args[0], ast.Constant) and not node.args[0].value
            )
            if is_pause or called(node) in CLOCKS:
                yield node


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Syntax trees of the tests by file, read for the tests below alone."""
    return {
        name: ast.parse(path.read_text())
        for path in sorted(TESTS.rglob("*.py"))
        if (name := path.relative_to(TESTS).as_posix()) != "patience.py"
        and name.partition("/")[0] not in PROGRAMS
    }


def test_no_wait_has_a_limit_of_its_own() -> None:
    offences = [
        f"{name}:{call.lineno}: {called(call)} has a limit of its own; give it PATIENCE_S"
        for name, tree in trees().items()
        for call in limits(tree)
    ]
    assert not offences, "\n".join(offences)


def test_sleeps_and_clocks_only_become_fewer() -> None:
    counts = Counter({name: len(list(timed(tree))) for name, tree in trees().items()})
    assert +counts == COUNTED


@pytest.mark.parametrize(
    "code",
    [
        "httpx.get(url, timeout=60)",
        "asyncio.timeout(120)",
        "asyncio.wait_for(task, 5.0)",
        "process.wait(60)",
        "thread.join(30)",
        "until(fact, patience_s=60)",
        "LIMIT_S = 60\nprocess.wait(LIMIT_S)",
    ],
)
def test_a_limit_is_found(code: str) -> None:
    assert list(limits(ast.parse(code)))
    assert not list(limits(ast.parse(code.replace("5.0", "P").replace("60", "P").replace(
        "120", "P").replace("30", "P"))))  # fmt: skip


@pytest.mark.parametrize("code", ["time.sleep(0.1)", "await asyncio.sleep(D)", "time.monotonic()"])
def test_a_sleep_and_a_clock_are_found(code: str) -> None:
    assert list(timed(ast.parse(code)))


def test_letting_others_run_is_no_sleep() -> None:
    assert not list(timed(ast.parse("await asyncio.sleep(0)")))
