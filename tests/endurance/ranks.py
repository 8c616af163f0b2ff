"""Two ranks of this machine under faults: `python -m tests.endurance.ranks SEED`.

Rank 1 is stopped for a moment, killed while it decodes and while it computes a prompt, and rank 0
is killed. A stop that ends in time changes no answer; after a kill the requests get an error that
names the rank, or a broken connection, the group comes back, an agent's KV is still there, and the
greedy answer is the same as before.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from msgspec import Struct

from tests.cli.terminal import Shell
from tests.cli.test_hosts import HOSTS, ask, end_of_stream, goes_on, ranks, until_healthy

PAUSE_S = 1.5
"""Less than the four signs of life after which a rank counts as lost."""
LONG = "Count the stones of the harbor, one by one. " * 38


class RanksOutcome(Struct, frozen=True):
    """Pauses and kills, and the greedy answers compared afterwards."""

    n_pauses: int
    n_kills: int
    n_compared: int


def ranks_under_faults(folder: Path, seed: int) -> RanksOutcome:
    """Each fault once, in an order by chance; a supervisor gives up after five crashes."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(seed)
    shell = Shell(folder)
    shell.env.pop("MLX_STACK_WORKER")
    up = shell.up("--hosts", HOSTS)
    assert up.returncode == 0, up.stderr
    faults: list[Callable[[Shell], None]] = [_paused, _killed, _killed_in_prefill, _first_killed]
    random.shuffle(faults)
    try:
        first = ask(shell, agent="bob")
        expected = _greedy(shell)
        for fault in faults:
            fault(shell)
            until_healthy(shell)
            assert _greedy(shell) == expected, fault.__name__
            goes_on(shell, first)
    finally:
        shell.run("down")
        shell.kill()
    return RanksOutcome(1, 3, len(faults))


def _greedy(shell: Shell) -> Any:
    answer = ask(shell, cache_prompt=False, max_tokens=24)
    return answer["choices"][0]["message"]


def _paused(shell: Shell) -> None:
    """Rank 1 stops for a moment while it decodes: the answer comes to its end."""
    _, second = ranks(shell)
    resume = threading.Timer(PAUSE_S, partial(os.kill, second.pid, signal.SIGCONT))

    def pause() -> None:
        os.kill(second.pid, signal.SIGSTOP)
        resume.start()

    last, _ = end_of_stream(shell, pause)
    resume.join()
    assert last.strip() == "[DONE]", last
    assert second.is_running()


def _killed(shell: Shell) -> None:
    """Rank 1 is killed while it decodes: the error names it."""
    worker, second = ranks(shell)
    last, _ = end_of_stream(shell, partial(os.kill, second.pid, signal.SIGKILL))
    assert "rank 1 of 2" in last, last
    assert psutil.wait_procs([worker], timeout=120)[1] == []


def _killed_in_prefill(shell: Shell) -> None:
    """Rank 1 is killed before the first token: the status is an error in the dialect."""
    worker, second = ranks(shell)
    killing = threading.Timer(0.0, partial(os.kill, second.pid, signal.SIGKILL))
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 200, "ignore_eos": True}
    killing.start()
    try:
        answer = httpx.post(
            f"http://127.0.0.1:{shell.port}/v1/chat/completions", json=body, timeout=120
        )
        assert answer.status_code >= 500, answer.text
        assert answer.json()["error"]["message"]
    except httpx.TransportError:
        pass  # the worker had ended already
    assert psutil.wait_procs([worker], timeout=120)[1] == []


def _first_killed(shell: Shell) -> None:
    """Rank 0 is killed: the connection breaks, and rank 1 ends with it."""
    worker, second = ranks(shell)
    last, _ = end_of_stream(shell, partial(os.kill, worker.pid, signal.SIGKILL))
    assert last == ""
    assert psutil.wait_procs([second], timeout=120)[1] == []


if __name__ == "__main__":
    first_seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print(ranks_under_faults(Path(tempfile.mkdtemp(prefix="ranks-")), first_seed), flush=True)
