"""A service on two ranks of this machine: it answers, and comes back when a rank is killed."""

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from mlxstack.host.ranks import MODULE
from tests.cli.terminal import Shell

pytestmark = pytest.mark.net
HOSTS = "127.0.0.1,127.0.0.1"
FIRST = {"role": "user", "content": "Say hello to everybody in this room. " * 12}


def ask(shell: Shell, **more: Any) -> Any:
    body = {"messages": [FIRST], "temperature": 0, "max_tokens": 8}
    url = f"http://127.0.0.1:{shell.port}/v1/chat/completions"
    answer = httpx.post(url, json=body | more, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


def ranks(shell: Shell) -> tuple[psutil.Process, psutil.Process]:
    """The processes of both ranks."""
    worker = psutil.Process(shell.services()["tiny"]["worker_pid"])
    return worker, next(one for one in worker.children() if MODULE in one.cmdline())


def until_healthy(shell: Shell) -> None:
    for _ in range(1200):
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{shell.port}/health").is_success:
                return
        time.sleep(0.05)
    raise AssertionError("the service has not come back")


def test_a_killed_rank_is_told_and_the_group_comes_back(shell: Shell) -> None:
    shell.env.pop("MLX_STACK_WORKER")
    up = shell.up("--hosts", HOSTS)
    assert up.returncode == 0, up.stderr
    try:
        first = ask(shell, agent="bob")
        metrics = httpx.get(f"http://127.0.0.1:{shell.port}/metrics").text
        values = dict(
            line.split() for line in metrics.splitlines() if line.startswith("mlxstack_rank")
        )
        assert float(values["mlxstack_rank_records_total"]) >= 8
        assert float(values["mlxstack_rank_bytes_total"]) > 0

        swap = shell.run("swap", "demo")
        assert swap.returncode != 0 and "`hosts`" in swap.stderr

        worker, other = ranks(shell)
        body = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
        url = f"http://127.0.0.1:{shell.port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body | {"max_tokens": 900, "ignore_eos": True}) as said:
            lines = (line for line in said.iter_lines() if line.startswith("data:"))
            next(lines)
            os.kill(other.pid, signal.SIGKILL)
            *_, last = lines
        assert (
            "rank 1 of 2 (127.0.0.1)" in json.loads(last.removeprefix("data:"))["error"]["message"]
        )

        assert psutil.wait_procs([worker], timeout=120)[1] == []
        until_healthy(shell)
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        turns = [FIRST, answer, {"role": "user", "content": "Go on."}]
        again = ask(shell, agent="bob", messages=turns)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 0.99 * first["usage"]["prompt_tokens"]
        _, other = ranks(shell)
    finally:
        shell.run("down")
    assert psutil.wait_procs([other], timeout=120)[1] == []


def test_settings_that_do_not_go_with_hosts_are_named(shell: Shell) -> None:
    refused = shell.up("--hosts", HOSTS, "--set", "speculation=auto")
    assert refused.returncode != 0
    assert "speculation" in refused.stderr and "does not go with `hosts`" in refused.stderr
    alone = shell.up("--hosts", "127.0.0.1")
    assert alone.returncode != 0
    assert "names one machine" in alone.stderr
