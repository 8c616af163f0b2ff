"""Services of one home: spec, state, owner lock; list, start, stop."""

import asyncio
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from mlxstack.core.errors import Broken, Taken
from mlxstack.core.formatting import short_time
from mlxstack.core.preset import Preset, ServerSpec
from mlxstack.host import log_lines
from mlxstack.host.home import Home, make_folder, make_home
from mlxstack.host.logs import tail
from mlxstack.host.process import ProcessId, ask_to_stop, end, is_alive, kill, wait_gone
from mlxstack.host.restart_policy import RestartPolicy

T = TypeVar("T")

log = logging.getLogger(__name__)
"""Warnings reach the stderr of a command, which configures no handler."""

KEY_VARIABLE = "MLX_STACK_API_KEY"

PROBE_S = 0.1
TIMEOUT_FACTOR = 5
"""Factor of the limit that a start which was too slow is advised to take."""

GATEWAY = "mlxstack.gateway"
"""Module that the worker of a gateway runs."""


class Phase(StrEnum):
    """Phase of the supervisor; CRASHED: it gave up, STOPPED: by request."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CRASHED = "crashed"


class ServiceSpec(Struct, frozen=True):
    """Spec of a service for its supervisor."""

    name: str
    root: str
    """Home of the service."""
    preset: str
    """As the person typed it, like `overrides`."""
    url: str
    worker: tuple[str, ...]
    """Command of the worker."""
    env: dict[str, str] = {}
    """Additions to the environment of the supervisor."""
    overrides: tuple[str, ...] = ()
    """Texts of `--set`."""
    cwd: str = ""
    """Folder from which relative paths in `preset` and `overrides` start."""
    n_slots: int = 0
    n_ctx: int = 0
    """Tokens per slot."""
    policy: RestartPolicy = field(default=RestartPolicy(), name="patience")
    """In files under its earlier name, so that an update finds running services."""

    @property
    def home(self) -> Home:
        """The home this service lives in."""
        return Home(Path(self.root))

    @property
    def stop_s(self) -> float:
        """Seconds in which its supervisor ends."""
        return self.policy.grace_s + 1.0


class ServiceState(Struct, frozen=True):
    """State of a service, written by its supervisor."""

    spec: ServiceSpec = field(name="plan")
    """In files under its earlier name, as `ServiceSpec.policy` is."""
    phase: Phase
    supervisor: ProcessId
    worker: ProcessId | None = None
    since: float = 0.0
    """Unix seconds of the last start of a worker."""
    n_crashes: int = 0
    exit_code: int | None = None
    """Of the last worker that ended; negative for a signal."""
    exit_summary: str = ""
    """Description of its end: "was killed by SIGKILL"."""
    last_log_lines: tuple[str, ...] = ()
    """Of the worker that ended."""


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` (0600) atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON, atomically."""
    write_private(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_json(path: Path, kind: type[T]) -> T | None:
    """Value in `path`; None if missing or not a `kind`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def read_state(home: Home, name: str) -> ServiceState | None:
    """State of a service; None if there is none.

    That in a copy of a home is of another home, whose processes this one must not stop.
    """
    state = read_json(home.state_file(name), ServiceState)
    if state is not None and _is_of(home, state):
        return state
    return None


def _is_of(home: Home, state: ServiceState) -> bool:
    with suppress(OSError):
        return home.root.samefile(state.spec.root)
    return False


def owner(home: Home, name: str) -> ServiceState | None:
    """The state of a service whose supervisor is alive.

    The PID file and the state must name the same process, born when the state says: a number
    that another process has now, or that another user wrote, is stale.
    """
    state = read_state(home, name)
    try:
        pid = int(home.pid_file(name).read_text("ascii"))
    except (OSError, ValueError):
        return None
    if state is None or state.supervisor.pid != pid or not is_alive(state.supervisor):
        return None
    return state


def claim(state: ServiceState) -> None:
    """Claim a service name for the supervisor in `state`. Raises Taken."""
    home = state.spec.home
    name = state.spec.name
    with _ours(home):
        refuse_other_case(home, name)
        holder = owner(home, name)
        if holder is not None:
            raise Taken(
                f"`{name}` is already running: pid {holder.supervisor.pid}, "
                f"preset {holder.spec.preset}, {holder.spec.url}"
            )
        _write_claim(state)


def _write_claim(state: ServiceState) -> None:
    """Write state and PID file of a service."""
    home = state.spec.home
    name = state.spec.name
    write_json(home.state_file(name), state)
    write_private(home.pid_file(name), f"{state.supervisor.pid}\n".encode())


class FileCopy(Struct, frozen=True):
    """Bytes of a file and its time of modification in nanoseconds."""

    changed_at_ns: int
    data: bytes


class ServiceFiles:
    """Files of a running service in `run`, which may be deleted meanwhile."""

    def __init__(self, home: Home, name: str) -> None:
        self._home = home
        self._name = name
        self._copies: dict[Path, FileCopy] = {}
        self.keep()

    def keep(self) -> None:
        """Read the files that have changed."""
        home = self._home
        for file_of in (home.spec_file, home.preset_file, home.gateway_file):
            path = file_of(self._name)
            with suppress(OSError):
                changed_at_ns = path.stat().st_mtime_ns
                copy = self._copies.get(path)
                if copy is None or copy.changed_at_ns != changed_at_ns:
                    self._copies[path] = FileCopy(changed_at_ns, path.read_bytes())

    def restore(self, state: ServiceState) -> bool:
        """Write what is missing; False if nothing is.

        Where another service has the name by now, its files stay.
        Raises OSError, SetupError.
        """
        home = self._home
        name = self._name
        if home.state_file(name).exists() and home.pid_file(name).exists():
            return False
        make_home(home)
        with _ours(home):
            if owner(home, name) is not None:
                return False
            for path, copy in self._copies.items():
                if not path.exists():
                    make_folder(path.parent)
                    write_private(path, copy.data)
            _write_claim(state)
        return True


def refuse_other_case(home: Home, name: str) -> None:
    """Raise Taken for a running service whose name differs by case only.

    On a Mac both have the same files.
    """
    for file in home.run.glob("*.json"):
        state = read_json(file, ServiceState)
        holder = file.stem if state is None else state.spec.name
        is_same_file = holder != name and holder.casefold() == name.casefold()
        if is_same_file and owner(home, holder) is not None:
            raise Taken(
                f"`{holder}` is running, and its name differs from `{name}` by case only: on a "
                f"Mac they have the same files; stop it with `mlx-stack down {holder}`, or choose "
                "another --name"
            )


def release(home: Home, name: str) -> None:
    """Give the name back."""
    home.pid_file(name).unlink(missing_ok=True)


def mark_stopped(home: Home, state: ServiceState) -> None:
    """Mark a dead supervisor as stopped, unless it has a successor."""
    name = state.spec.name
    with _ours(home):
        if owner(home, name) is None:
            ended = msgspec.structs.replace(state, phase=Phase.STOPPED, worker=None)
            write_json(home.state_file(name), ended)
            release(home, name)


@contextmanager
def locked(path: Path, waits: bool = True) -> Iterator[None]:
    """Exclusive file lock. Raises BlockingIOError unless `waits`."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _ours(home: Home) -> AbstractContextManager[None]:
    """While names change their owners."""
    return locked(home.run / "lock")


class ServedAt(Struct, frozen=True):
    """Section that presets and specs of gateways share."""

    server: ServerSpec = ServerSpec()


def is_gateway(spec: ServiceSpec) -> bool:
    """Whether this service is a gateway."""
    return GATEWAY in spec.worker


def usable_key(server: ServerSpec) -> str | None:
    """First API key in plain text; None where all are hashes."""
    texts = (key if isinstance(key, str) else key.key for key in server.api_keys)
    return next((text for text in texts if not text.startswith("sha256:")), None)


def names(home: Home) -> list[str]:
    """Names of all services ever started here, running or not."""
    return sorted(file.name.removesuffix(".json") for file in home.run.glob("[!.]*.json"))


def running(home: Home) -> list[ServiceState]:
    """The services whose supervisor is alive."""
    return [state for name in names(home) if (state := owner(home, name)) is not None]


def served(home: Home) -> dict[str, Preset]:
    """Preset that each running service serves, by name."""
    named = [state.spec.name for state in running(home)]
    served_presets = {name: read_json(home.preset_file(name), Preset) for name in named}
    return {name: preset for name, preset in served_presets.items() if preset is not None}


def sweep(home: Home, name: str) -> str | None:
    """Clear a dead supervisor's files; returns a sentence, else None.

    A worker that outlived its supervisor is ended, so that it frees its port and its memory.
    """
    pid_file = home.pid_file(name)
    if owner(home, name) is not None or not pid_file.exists():
        return None
    state = read_state(home, name)
    if state is not None and state.worker is not None and is_alive(state.worker):
        end(state.worker, state.spec.policy.grace_s)
    with _ours(home):
        if owner(home, name) is not None or not pid_file.exists():
            return None
        release(home, name)
    return f"cleared {pid_file}: the process it names is not the supervisor of `{name}` any more"


@contextmanager
def starting(home: Home, name: str, waits: bool) -> Iterator[ServiceState | None]:
    """Serialize starts of one service; its owner, if it runs.

    So specs are not overwritten. A service that stops is waited for, and the files of a dead one
    are cleared. Raises Taken when another start goes on and `waits` is false.
    """
    make_home(home)
    with ExitStack() as held:
        try:
            held.enter_context(locked(home.run / f"{name}.start", waits))
        except BlockingIOError:
            raise Taken(f"`{name}` is being started by another command; wait for that") from None
        refuse_other_case(home, name)
        state = owner(home, name)
        if state is not None and state.phase is Phase.STOPPING:
            log.warning("waiting until %s has stopped", name)
            wait_gone(state.supervisor, state.spec.stop_s)
        if (cleared := sweep(home, name)) is not None:
            log.warning("%s", cleared)
        yield owner(home, name)


def start(spec: ServiceSpec) -> "subprocess.Popen[bytes]":
    """Start a supervisor in the background, in a session of its own."""
    home = spec.home
    write_json(home.spec_file(spec.name), spec)
    log = home.supervisor_log(spec.name)
    log.unlink(missing_ok=True)
    log.touch(mode=0o600)
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "mlxstack.control.supervisor", str(home.spec_file(spec.name))],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd=home.root,
            start_new_session=True,
        )


async def until_answered(
    spec: ServiceSpec,
    ask: Callable[[], Awaitable[T | None]],
    why_ended: Callable[[], str],
    timeout_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> T:
    """First answer of a service that starts. Raises Broken.

    `progress` gets the lines of its log. A start may take as long as it logs new ones; it fails
    after `timeout_s` without one, or with the reason of an end.
    """
    began_at = time.monotonic()
    deadline = began_at + timeout_s
    last_line = ""
    message = ""
    log_file = spec.home.log_file(spec.name)
    while time.monotonic() < deadline:
        if reason := why_ended():
            raise Broken(reason)
        if (answer := await ask()) is not None:
            return answer
        line = next(iter(tail(log_file, 1)), "").strip()
        message = log_lines.read(line).message
        if line != last_line:
            deadline = time.monotonic() + timeout_s
            last_line = line
        progress(message)
        await asyncio.sleep(PROBE_S)
    elapsed = short_time(time.monotonic() - began_at)
    raise Broken(
        f"`{spec.name}` was not healthy after {elapsed}, {timeout_s:g} s of them "
        f"(server.startup_timeout_s) after the last line of its log: {message or '(none)'}. If "
        "that takes longer here, add `--set server.startup_timeout_s="
        f"{timeout_s * TIMEOUT_FACTOR:g}`; its log is {log_file}"
    )


def state_of(spec: ServiceSpec, process: "subprocess.Popen[bytes]") -> ServiceState | None:
    """State that this supervisor wrote, not an earlier one."""
    state = read_state(spec.home, spec.name)
    if state is not None and state.supervisor.pid == process.pid:
        return state
    return None


def last_error(state: ServiceState) -> str:
    """Last error that a worker logged before its end; else ""."""
    lines = map(log_lines.read, reversed(state.last_log_lines))
    last = next((line.message for line in lines if line.is_error), "")
    return last.removeprefix(log_lines.ERROR_PREFIX)


def stop(home: Home, state: ServiceState, patience_s: float | None = None) -> bool:
    """Stop a running service; True if it had to be killed.

    The supervisor is asked, and lets the worker drain. After `patience_s` seconds, by default
    those of its spec, both are killed.
    """
    if patience_s is None:
        patience_s = state.spec.stop_s
    ask_to_stop(state.supervisor)
    if wait_gone(state.supervisor, patience_s):
        return False
    finish(home, read_state(home, state.spec.name) or state)
    return True


def finish(home: Home, state: ServiceState) -> None:
    """Kill both processes and record that."""
    for process in (state.worker, state.supervisor):
        if process is not None:
            kill(process)
            wait_gone(process, 2.0)
    mark_stopped(home, state)
