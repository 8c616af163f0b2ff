"""Start of a model for a command that needs a running service."""

import json
import os
import subprocess
import sys

from msgspec import Struct

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import confirm, is_interactive, note, spinner
from mlxstack.cli.target import ServiceTarget, membership, target
from mlxstack.client.errors import Unreachable
from mlxstack.config import presets
from mlxstack.core.errors import SetupError
from mlxstack.core.formatting import tokens
from mlxstack.host import services
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.models.reference import resolve
from mlxstack.policy.memory.capacity_advice import AGENT_TOKENS


class StartOffer(Struct, frozen=True):
    """Preset for a number of agents, with options and command of `up`."""

    preset: str
    n_agents: int
    options: tuple[str, ...]
    command: str


def service_of(home: Home, model: str) -> str:
    """Service or member named `model` or serving it, else a new one."""
    if model in [state.spec.name for state in services.running(home)]:
        return model
    if (owner := membership(home, model)) is not None:
        return owner.member
    if not presets.is_known(model, home):
        model_id = resolve(model, home).id
        if (owner := membership(home, model_id)) is not None:
            return owner.member
        for name, preset in services.served(home).items():
            if preset.model.id == model_id:
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
    with spinner("looking for a model that fits this machine"):
        offer = recommended(home)
    size = f"{offer.n_agents} x {tokens(AGENT_TOKENS)} tokens"
    question = f"No service is running. Start {offer.preset} ({size}) for {purpose}?"
    if not (is_interactive() and confirm(question, default=True, err=True)):
        raise Unreachable(f"no service is running; start one with `{offer.command}`")
    return target(home, start(offer.preset, *offer.options), None)


def refuse_without_service(home: Home) -> None:
    """Raise Unreachable, with the command that starts the recommended model."""
    if not services.running(home):
        raise Unreachable(f"no service is running; start one with `{recommended(home).command}`")


def recommended(home: Home) -> StartOffer:
    """Preset that `plan` recommends for coding agents. Raises SetupError."""
    from mlxstack.planner import ranking

    candidates = ranking.agent_presets(home)
    memory = this_memory(os.environ)
    for n_agents in (ranking.N_AGENTS, 1):
        for row in ranking.ranked(candidates, memory, n_agents, AGENT_TOKENS):
            if row.command:
                return StartOffer(row.preset, n_agents, row.options, row.command)
    n_ctx = tokens(AGENT_TOKENS)
    raise SetupError(
        f"no service is running, and no preset with {n_ctx} of context fits into the memory of "
        "this machine; `mlx-stack plan --all` shows what each needs, `mlx-stack up demo` starts a "
        "tiny model"
    )


def start(model: str, *options: str) -> str:
    """Run `up` with its progress; the service's name, or exit."""
    arguments = ("up", model, *options, "--if-needed", "--json")
    command = [sys.executable, "-m", "mlxstack.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return str(json.loads(done.stdout)["name"])
