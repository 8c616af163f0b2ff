"""A service on two ranks of this machine: it answers, and comes back when a rank is killed."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from mlxstack.features.ranks.hosts import MODULE
from tests import models
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S, wait_until
from tests.repetition import in_soak

pytestmark = pytest.mark.net
HOSTS = "127.0.0.1,127.0.0.1"
FIRST = {"role": "user", "content": "Say hello to everybody in this room. " * 12}


def ask(shell: Shell, **more: Any) -> Any:
    body = {"messages": [FIRST], "temperature": 0, "max_tokens": 8}
    url = f"http://127.0.0.1:{shell.port}/v1/chat/completions"
    answer = httpx.post(url, json=body | more, timeout=PATIENCE_S)
    assert answer.is_success, answer.text
    return answer.json()


def ranks(shell: Shell) -> tuple[psutil.Process, psutil.Process]:
    """The processes of both ranks."""
    worker = psutil.Process(shell.services()["tiny"]["worker_pid"])
    return worker, next(one for one in worker.children() if MODULE in one.cmdline())


def until_healthy(shell: Shell) -> None:
    def is_healthy() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{shell.port}/health").is_success
        return False

    wait_until(is_healthy, "the service has not come back")


def end_of_stream(shell: Shell, hit: Callable[[], None], after_s: float = 0.0) -> str:
    """Last line of an answer during which `hit` was called; empty if the connection broke."""
    body = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
    url = f"http://127.0.0.1:{shell.port}/v1/chat/completions"
    body |= {"max_tokens": 900, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data:"))
        next(lines)
        time.sleep(after_s)
        hit()
        try:
            *_, last = lines
        except httpx.RemoteProtocolError:
            last = ""
    return last.removeprefix("data:")


def goes_on(shell: Shell, first: dict[str, Any]) -> None:
    """Check that the agent's context of its first answer is cached."""
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    turns = [FIRST, answer, {"role": "user", "content": "Go on."}]
    again = ask(shell, agent="bob", messages=turns)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.99 * first["usage"]["prompt_tokens"]


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
        last = end_of_stream(shell, partial(os.kill, other.pid, signal.SIGKILL))
        assert "rank 1 of 2 (127.0.0.1)" in json.loads(last)["error"]["message"]
        assert psutil.wait_procs([worker], timeout=PATIENCE_S)[1] == []
        until_healthy(shell)
        goes_on(shell, first)

        worker, other = ranks(shell)
        last = end_of_stream(shell, partial(os.kill, worker.pid, signal.SIGKILL))
        assert last == ""
        assert psutil.wait_procs([other], timeout=PATIENCE_S)[1] == []
        until_healthy(shell)
        goes_on(shell, first)
        _, other = ranks(shell)
    finally:
        shell.run("down")
    assert psutil.wait_procs([other], timeout=PATIENCE_S)[1] == []


SSH = """\
#!/bin/sh
echo "$1 $2 $3 $4" > "$SSH_LOG"
[ "$4" = 127.0.1 ] || exit 255
shift 4
HF_HUB_CACHE="${THERE:-$HF_HUB_CACHE}" exec sh -c "$*"
"""
"""Runs the command here, as if it was on 127.0.1, where the hub's cache is in THERE, if set.

No other host can be reached.
"""
TWO_LAYERS = models.LLAMA | {"num_hidden_layers": 2}
OTHER_FILES = "rank 1 of 2 (127.0.1) has other model files than rank 0; `mlx-stack doctor --hosts"


@pytest.fixture
def ssh_log(shell: Shell) -> Path:
    """First words of the last SSH command of a terminal whose SSH is `SSH`."""
    shell.env.pop("MLX_STACK_WORKER")
    program = shell.folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    found = shell.folder / "ssh.log"
    shell.env |= {"PATH": f"{program.parent}:{shell.env['PATH']}", "SSH_LOG": str(found)}
    return found


def test_a_rank_on_another_host_is_started_by_ssh(shell: Shell, ssh_log: Path) -> None:
    # An address in a form that the resolver alone takes for one of this machine.
    up = shell.up("--hosts", "127.0.0.1,127.0.1")
    assert up.returncode == 0, up.stderr
    try:
        assert ssh_log.read_text() == "-T -o BatchMode=yes 127.0.1\n"
        assert ask(shell)["usage"]["completion_tokens"] == 8
    finally:
        shell.run("down")


def in_cache(folder: Path, config: dict[str, Any], seed: int = 0) -> str:
    """A cache of the hub with one model."""
    cached = folder / "models--tiny--one"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    models.write(cached / "snapshots" / ("0" * 40), config, seed)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TWO_LAYERS | {"hidden_size": 128}, OTHER_FILES),
        *in_soak(
            (TWO_LAYERS, OTHER_FILES),
            (models.LLAMA, OTHER_FILES),
            (TWO_LAYERS | {"num_key_value_heads": 1}, "it has 1 heads (n_kv_heads)"),
            (models.SLIDING, "mlx-lm cannot divide tiny/one"),
            (None, "tiny/one is not on this machine"),
        ),
    ],
)
def test_a_rank_with_another_model_is_refused_before_the_first_pass(
    shell: Shell, ssh_log: Path, config: dict[str, Any] | None, reason: str
) -> None:
    """In a pass, ranks of different shapes wait for each other for ever."""
    shell.env |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": in_cache(shell.folder / "here", TWO_LAYERS),
        "THERE": str(shell.folder / "there"),
    }
    if config is not None:
        in_cache(shell.folder / "there", config, seed=1)
    preset = shell.preset.read_text().replace("extends: demo", "model: {id: tiny/one}")
    shell.preset.write_text(preset)
    up = shell.up("--hosts", "127.0.0.1,127.0.1")
    assert up.returncode != 0 and ssh_log.exists()
    assert reason in up.stderr and "startup_timeout_s" not in up.stderr


def test_a_host_that_cannot_be_reached_is_named_at_once(shell: Shell, ssh_log: Path) -> None:
    up = shell.up("--hosts", "127.0.0.1,127.0.2")
    assert up.returncode != 0
    assert "no rank has connected from 127.0.2; its command ended with status 255" in up.stderr
    assert "ssh -T -o BatchMode=yes 127.0.2 " in up.stderr
    assert ssh_log.exists()


def test_settings_that_do_not_go_with_hosts_are_named(shell: Shell) -> None:
    refused = shell.up("--hosts", HOSTS, "--set", "model.adapter=/nowhere")
    assert refused.returncode != 0
    assert "model.adapter" in refused.stderr and "does not go with `hosts`" in refused.stderr
    alone = shell.up("--hosts", "127.0.0.1")
    assert alone.returncode != 0
    assert "names one machine" in alone.stderr


@pytest.mark.soak
def test_a_rank_that_stops_without_a_word_is_told(shell: Shell) -> None:
    shell.env.pop("MLX_STACK_WORKER")
    assert shell.up("--hosts", HOSTS).returncode == 0
    try:
        first = ask(shell, agent="bob")
        worker, other = ranks(shell)
        last = end_of_stream(shell, partial(os.kill, other.pid, signal.SIGSTOP))
        assert "4 signs of life missed" in json.loads(last)["error"]["message"]
        assert psutil.wait_procs([worker, other], timeout=PATIENCE_S)[1] == []
        until_healthy(shell)
        goes_on(shell, first)
    finally:
        shell.run("down")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_killed_at_random_moments(shell: Shell, seed: int) -> None:
    # A supervisor gives up after five crashes in ten minutes.
    shell.env.pop("MLX_STACK_WORKER")
    assert shell.up("--hosts", HOSTS).returncode == 0
    random = Random(seed)
    try:
        first = ask(shell, agent="bob")
        for _ in range(4):
            both = ranks(shell)
            victim = random.choice(both)
            kill = partial(os.kill, victim.pid, signal.SIGKILL)
            last = end_of_stream(shell, kill, random.uniform(0, 1.5))
            assert victim is both[0] or "rank 1 of 2" in json.loads(last)["error"]["message"]
            assert psutil.wait_procs(both, timeout=PATIENCE_S)[1] == []
            until_healthy(shell)
            goes_on(shell, first)
    finally:
        shell.run("down")
