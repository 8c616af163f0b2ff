"""Start of a model for a command that needs a running service."""

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import typer
from msgspec import Struct

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note
from mlxstack.cli.target import ServiceTarget, membership, target
from mlxstack.client import Unreachable
from mlxstack.core.errors import SetupError
from mlxstack.host import model_reference, services
from mlxstack.host.home import Home
from mlxstack.host.model_reference import ReferenceKind

CTX = "64k"
"""Context that a coding agent works with in comfort."""

N_AGENTS = (3, 1)
"""Agents to recommend for: a client with its sub-agents, else one."""


class StartOffer(Struct, frozen=True):
    """Preset, with options of `up` to fit this machine."""

    preset: str
    n_agents: int
    options: tuple[str, ...]


def service_of(home: Home, model: str) -> str:
    """Service or member named `model` or serving it, else a new one."""
    if model in [state.plan.name for state in services.running(home)]:
        return model
    if (found := membership(home, model)) is not None:
        return found.member
    reference = model_reference.resolve(model, home)
    if (found := membership(home, reference.id)) is not None:
        return found.member
    for name, preset in services.served(home).items():
        if reference.kind is ReferenceKind.MODEL and preset.model.id == reference.id:
            return name
    note(f"{model} is not running; starting it")
    return start(model)


def name_of(home: Home, name: str | None, url: str | None, model: str | None) -> str | None:
    """Name of `--name`, or started by `--model`. Raises Misuse for both."""
    if model is None:
        return name
    if name is not None or url is not None:
        raise Misuse("`--model` starts a service here; leave out `--name` and `--url`")
    return service_of(home, model)


def running_or_offered(home: Home, purpose: str) -> ServiceTarget:
    """The running service, else the recommended model, started if the user agrees.

    Raises Unreachable without a running service, terminal or consent; SetupError
    where no preset fits.
    """
    if services.running(home):
        return target(home, None, None)
    offer = recommended()
    size = f"{offer.n_agents} x {CTX} tokens"
    question = f"No service is running. Start {offer.preset} ({size}) for {purpose}?"
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if not (is_terminal and typer.confirm(question, default=True, err=True)):
        command = shlex.join(["mlx-stack", "up", offer.preset, *offer.options])
        raise Unreachable(f"no service is running; start one with `{command}`")
    return target(home, start(offer.preset, *offer.options), None)


def recommended() -> StartOffer:
    """Preset that `plan` recommends for coding agents. Raises SetupError."""
    for n_agents in N_AGENTS:
        words = ("plan", "--recommend", "--agents", str(n_agents), "--ctx", CTX, "--json")
        for one in _own_command(*words)["presets"]:
            if one["verdict"] == "fits":
                return StartOffer(one["preset"], n_agents, tuple(shlex.split(one["options"])))
    raise SetupError(
        f"no service is running, and no preset with {CTX} of context fits into the memory of "
        "this machine; `mlx-stack plan` shows what does, `mlx-stack up demo` starts a tiny model"
    )


def start(model: str, *options: str) -> str:
    """Run `mlx-stack up` with its progress; the service's name."""
    return str(_own_command("up", model, *options, "--if-needed", "--json")["name"])


def _own_command(*words: str) -> dict[str, Any]:
    """JSON of another `mlx-stack` command; its failure is the exit."""
    command = [sys.executable, "-m", "mlxstack.cli.main", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
