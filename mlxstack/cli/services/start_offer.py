"""Start of a model for a command that needs a running service."""

import json
import os
import subprocess
import sys
from typing import Any

import typer

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note
from mlxstack.cli.target import ServiceTarget, target
from mlxstack.client import Unreachable
from mlxstack.core.errors import SetupError
from mlxstack.host import services
from mlxstack.host.home import Home
from mlxstack.host.preset_schema import suggestion

AGENT_CTX = "64k"
"""Context that a coding agent works with in comfort."""


def running_or_started(home: Home, model: str) -> ServiceTarget:
    """The service of this name, else one that is started for this preset or model."""
    known = services.names(home)
    if model in [state.plan.name for state in services.running(home)]:
        return target(home, model, None)
    if model.startswith(("http://", "https://")):
        return target(home, None, model)
    if model in known:
        note(f"{model} is not running; starting it")
    return target(home, start(model), None)


def running_or_offered(home: Home, purpose: str) -> ServiceTarget:
    """The running service, else the recommended model, started if the user agrees.

    Raises Unreachable where nothing runs and nobody can be asked, or the answer is no.
    """
    if services.running(home):
        return target(home, None, None)
    model = recommended()
    remedy = f"start one with `mlx-stack up {model}`"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Unreachable(f"no service is running; {remedy}")
    question = f"No service is running. Start {model}, the recommended model for {purpose}?"
    if not typer.confirm(question, default=True, err=True):
        raise Unreachable(f"no service is running; {remedy}")
    return target(home, start(model), None)


def recommended() -> str:
    """The preset that `plan` recommends for one coding agent. Raises SetupError if none fits."""
    told = _own_command("plan", "--recommend", "--agents", "1", "--ctx", AGENT_CTX, "--json")
    fitting = [one["preset"] for one in told["presets"] if one["verdict"] == "fits"]
    if not fitting:
        raise SetupError(
            f"no service is running, and no preset with {AGENT_CTX} of context fits into the "
            "memory of this machine; `mlx-stack plan` shows what does"
        )
    return str(fitting[0])


def start(model: str) -> str:
    """Run `mlx-stack up`, whose progress goes to stderr; the name of the service."""
    return str(_own_command("up", model, "--if-needed", "--json")["name"])


def _own_command(*words: str) -> dict[str, Any]:
    """JSON of another `mlx-stack` command; its failure ends this one with the same exit code."""
    command = [sys.executable, "-m", "mlxstack.cli.main", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def unknown(kind: str, given: str, known: list[str]) -> Misuse:
    """A name that is none of the `known` ones."""
    return Misuse(f"no {kind} is called `{given}`{suggestion(given, known)}")
