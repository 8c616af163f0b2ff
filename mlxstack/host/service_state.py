"""Files of a service in `run/`: spec, state, owner lock."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from mlxstack.core.errors import Taken
from mlxstack.host.home import Home
from mlxstack.host.process import ProcessId, is_alive

T = TypeVar("T")


class Phase(StrEnum):
    """Phase of the supervisor; CRASHED: it gave up, STOPPED: by request."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CRASHED = "crashed"


class RestartPolicy(Struct, frozen=True):
    """Limits of a worker: crashes, and time stuck. Times in seconds.

    A dead worker starts again after `first_s`, doubling up to `longest_s`. `max_crashes` within
    `window_s` are too many. A worker asked to stop is killed after `grace_s`.

    Health is polled every `look_s` seconds. A worker is killed when it does not answer for
    `silent_s`, or is neither healthy nor loading for `stuck_s`: by then it has failed every
    request that waits.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    max_crashes: int = 5
    window_s: float = 600.0
    grace_s: float = 12.0
    look_s: float = 5.0
    silent_s: float = 30.0
    stuck_s: float = 150.0


class ServiceSpec(Struct, frozen=True):
    """Supervisor's spec: the `worker` command, and additions to `env`.

    `preset` and `overrides` are as the person typed them in the folder `cwd`; `n_ctx` is tokens
    per slot.
    """

    name: str
    root: str
    preset: str
    url: str
    worker: tuple[str, ...]
    env: dict[str, str] = {}
    overrides: tuple[str, ...] = ()
    cwd: str = ""
    n_slots: int = 0
    n_ctx: int = 0
    patience: RestartPolicy = RestartPolicy()

    @property
    def home(self) -> Home:
        """The home this service lives in."""
        return Home(Path(self.root))


class ServiceState(Struct, frozen=True):
    """State by the supervisor; `since`: Unix seconds of the last start.

    `last_log_lines` are those of a worker that ended with `exit_code` (negative: a signal), and
    `exit_summary` describes its end: "was killed by SIGKILL".
    """

    plan: ServiceSpec
    phase: Phase
    supervisor: ProcessId
    worker: ProcessId | None = None
    since: float = 0.0
    n_crashes: int = 0
    exit_code: int | None = None
    exit_summary: str = ""
    last_log_lines: tuple[str, ...] = ()


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` (0600) atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as why:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(why, OSError):
            why.filename = str(path)
        raise


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON, atomically."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_json(path: Path, kind: type[T]) -> T | None:
    """Value in `path`; None if missing or not a `kind`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def read_state(home: Home, name: str) -> ServiceState | None:
    """State of a service; None if there is none."""
    return read_json(home.state_file(name), ServiceState)


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
    home, name = state.plan.home, state.plan.name
    with _ours(home):
        refuse_other_case(home, name)
        other = owner(home, name)
        if other is not None:
            raise Taken(
                f"`{name}` is already running: pid {other.supervisor.pid}, "
                f"preset {other.plan.preset}, {other.plan.url}"
            )
        write_json(home.state_file(name), state)
        write_atomic(home.pid_file(name), f"{state.supervisor.pid}\n".encode())


def refuse_other_case(home: Home, name: str) -> None:
    """Raise Taken for a running service whose name differs by case only.

    On a Mac both have the same files.
    """
    for file in home.run.glob("*.json"):
        state = read_json(file, ServiceState)
        other = file.stem if state is None else state.plan.name
        is_same_file = other != name and other.casefold() == name.casefold()
        if is_same_file and owner(home, other) is not None:
            raise Taken(
                f"`{other}` is running, and its name differs from `{name}` by case only: on a Mac "
                f"they have the same files; stop it with `mlx-stack down {other}`, or choose "
                "another --name"
            )


def release(home: Home, name: str) -> None:
    """Give the name back."""
    home.pid_file(name).unlink(missing_ok=True)


def clear(home: Home, name: str) -> bool:
    """Release a dead supervisor's name; False without one."""
    with _ours(home):
        is_stale = owner(home, name) is None and home.pid_file(name).exists()
        if is_stale:
            release(home, name)
    return is_stale


def mark_stopped(home: Home, state: ServiceState) -> None:
    """Mark a dead supervisor as stopped, unless it has a successor."""
    name = state.plan.name
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
