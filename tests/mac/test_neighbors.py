"""Services of one home divide one memory: the sum of their budgets stays within the ceiling."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxstack.host.memory_budget import memory_of
from mlxstack.policy.memory.capacity import MARGIN_BYTES
from tests.cli.terminal import Shell
from tests.patience import wait_until
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

MEMORY = "4GiB"
CEILING = memory_of(4 * 2**30).usable


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A terminal that starts real services on an imagined memory."""
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    shell.env["MLX_STACK_MEMORY"] = MEMORY
    yield shell
    shell.run("down")


def start(shell: Shell, name: str, *words: str) -> None:
    done = shell.up("--name", name, "--port", str(unused_port()), *words)
    assert done.returncode == 0, done.stderr


def budgets(shell: Shell) -> dict[str, int]:
    """KV budget of each service, as `status` tells it."""
    return {name: one["kv_budget_bytes"] for name, one in shell.services().items()}


def planned(shell: Shell, *words: str) -> dict[str, Any]:
    """Forecast of one more service."""
    found: dict[str, Any] = json.loads(
        shell.run("plan", str(shell.preset), "--json", *words).stdout
    )
    return found


def until(shell: Shell, expected: dict[str, int]) -> None:
    """Wait until the running services have planned again."""
    wait_until(
        lambda: {name: n for name, n in budgets(shell).items() if n} == expected,
        lambda: budgets(shell),
    )


def test_two_then_three_services_share_the_ceiling_and_one_alone_has_it_again(
    shell: Shell,
) -> None:
    alone = planned(shell)
    fixed = alone["spec"]["weights_bytes"] + alone["workspace_bytes"] + MARGIN_BYTES
    assert fixed + alone["kv_budget_bytes"] <= CEILING
    start(shell, "one")
    assert budgets(shell) == {"one": alone["kv_budget_bytes"]}
    for names in (("one", "two"), ("one", "two", "three")):
        each = planned(shell)["kv_budget_bytes"]
        assert len(names) * (fixed + each) <= CEILING
        start(shell, names[-1])
        until(shell, dict.fromkeys(names, each))
    for name in ("two", "three"):
        assert shell.run("down", name).returncode == 0
    until(shell, {"one": alone["kv_budget_bytes"]})
