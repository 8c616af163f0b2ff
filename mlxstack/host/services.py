"""Services of one home: list, start, stop."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from msgspec import Struct

from mlxstack.core.errors import Taken
from mlxstack.core.preset import Preset, ServerSpec
from mlxstack.host.home import Home, make_home
from mlxstack.host.process import ask_to_stop, end, is_alive, kill, wait_gone
from mlxstack.host.service_state import (
    ServiceSpec,
    ServiceState,
    clear,
    locked,
    mark_stopped,
    owner,
    read_json,
    read_state,
    refuse_other_case,
    write_json,
)

KEY_VARIABLE = "MLX_STACK_API_KEY"

GATEWAY = "mlxstack.gateway"
"""Module that the worker of a gateway runs."""


class HasServer(Protocol):
    """Preset, or spec of a gateway."""

    @property
    def server(self) -> ServerSpec:
        """Address and API keys."""


class ServedAt(Struct, frozen=True):
    """Section that presets and specs of gateways share."""

    server: ServerSpec = ServerSpec()


def is_gateway(plan: ServiceSpec) -> bool:
    """Whether this service is a gateway."""
    return GATEWAY in plan.worker


def usable_key(served: HasServer) -> str | None:
    """API key of a preset or gateway; None if stored as hash."""
    texts = (key if isinstance(key, str) else key.key for key in served.server.api_keys)
    return next((text for text in texts if not text.startswith("sha256:")), None)


def names(home: Home) -> list[str]:
    """Names of all services ever started here, running or not."""
    return sorted(file.name.removesuffix(".json") for file in home.run.glob("[!.]*.json"))


def running(home: Home) -> list[ServiceState]:
    """The services whose supervisor is alive."""
    return [state for name in names(home) if (state := owner(home, name)) is not None]


def served(home: Home) -> dict[str, Preset]:
    """Preset that each running service serves, by name."""
    named = [state.plan.name for state in running(home)]
    found = {name: read_json(home.preset_file(name), Preset) for name in named}
    return {name: preset for name, preset in found.items() if preset is not None}


def sweep(home: Home, name: str) -> str | None:
    """Clear a dead supervisor's files; returns a sentence, else None.

    A worker that outlived its supervisor is ended, so that it frees its port and its memory.
    """
    pid_file = home.pid_file(name)
    if owner(home, name) is not None or not pid_file.exists():
        return None
    state = read_state(home, name)
    if state is not None and state.worker is not None and is_alive(state.worker):
        end(state.worker, state.plan.patience.grace_s)
    if not clear(home, name):
        return None
    return f"cleared {pid_file}: the process it names is not the supervisor of `{name}` any more"


@contextmanager
def starting(home: Home, name: str, waits: bool) -> Iterator[None]:
    """Serialize starts of one service, so plans are not overwritten.

    Raises Taken when another start goes on and `waits` is false.
    """
    make_home(home)
    with ExitStack() as held:
        try:
            held.enter_context(locked(home.start_file(name), waits))
        except BlockingIOError:
            raise Taken(f"`{name}` is being started by another command; wait for that") from None
        refuse_other_case(home, name)
        yield


def start(plan: ServiceSpec) -> "subprocess.Popen[bytes]":
    """Start a supervisor in the background, in a session of its own."""
    home = plan.home
    write_json(home.plan_file(plan.name), plan)
    log = home.supervisor_log(plan.name)
    log.unlink(missing_ok=True)
    log.touch(mode=0o600)
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "mlxstack.control.supervisor", str(home.plan_file(plan.name))],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd=home.root,
            start_new_session=True,
        )


def stop(home: Home, state: ServiceState, patience_s: float) -> bool:
    """Stop a running service; True if it had to be killed.

    The supervisor is asked, and lets the worker drain. After `patience_s` seconds both are killed.
    """
    ask_to_stop(state.supervisor)
    if wait_gone(state.supervisor, patience_s):
        return False
    finish(home, read_state(home, state.plan.name) or state)
    return True


def finish(home: Home, state: ServiceState) -> None:
    """Kill both processes and record that."""
    for process in (state.worker, state.supervisor):
        if process is not None:
            kill(process)
            wait_gone(process, 2.0)
    mark_stopped(home, state)
