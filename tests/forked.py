"""Python programs of the tests, forked from a process that has imported their modules.

A program with an interpreter of its own spends most of its time on imports. After `install`,
`subprocess.Popen` forks those of this repository: a test process asks a process of this file,
whose grandchild becomes its child; a forked program forks itself, and asks a process that it
forked before once it runs uvloop or an engine. On a Mac, where a program is run in another way or
with other libraries, and with MLX_STACK_TEST_FORKS=0, Popen starts it as ever.

Variables of the hub are read by imports: a program for which they differ imports those modules
anew, unless it is started within `preloaded`. What models are like is computed once (`remembered`).
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from mlxstack.host.hardware import for_mlx
from tests import remembered
from tests.environment import option

CAN_FORK = sys.platform == "linux" and option("TEST_FORKS") != "0"
ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.prefix, "bin", "mlx-stack")
MODULES = (
    "mlxstack.api.server",
    "mlxstack.bench.dev.in_process.__main__",
    "mlxstack.bench.dev.registry",
    "mlxstack.engine.chat_engine",
    "mlxstack.engine.embedding_engine",
    "mlxstack.gateway.__main__",
    "mlxstack.control.supervisor",
    "mlxstack.features.formats.grammar.grammar_worker",
    "anyio._backends._asyncio",
    "typer._adapters",
)
"""Modules beside those of the commands; the last two are imported late."""
SHAPES = str(ROOT / "mlxstack" / "engine" / "model" / "model_shape.py")
WITHOUT_HUB = {
    SHAPES,
    "mlxstack.text.rendering.worker",
    "mlxstack.features.formats.grammar.grammar_worker",
}
"""Programs that use no client of the hub."""
AT_START = ("GLIBC_", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "PYTHON")
"""Variables that are read when a process starts; `LATER` are obeyed in a forked one too."""
LATER = {"PYTHONUNBUFFERED", "PYTHONUTF8", "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
SHELL_DETECTION = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""With it, Typer's commands take the name of a shell."""
OF_HUB = ("HF_", "HOME", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_CACHE_HOME")
"""Variables that the hub's client reads when it is imported."""
HUB_USERS = {"huggingface_hub", "mlx_lm", "mlxstack", "transformers"}
MAX_BYTES = 1 << 20
N_STREAMS = 3
PR_SET_CHILD_SUBREAPER = 36
TITLE = 45, 46
"""Fields of /proc/PID/stat behind the name: where the command line begins and ends."""
ROOM = " " * 4000
"""An argument that gives the command lines of forked programs room."""

HubVariables = frozenset[tuple[str, str]]
Popen = Any
EXECUTE: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]
"""Popen's own way to start a program."""
_env = {**os.environ, **for_mlx(os.environ), "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
_of_commands: set[str] = set()
_servers: dict[HubVariables, socket.socket] = {}
_helpers: list[socket.socket] = []
"""In a program with a loop of uvloop, one: the process that forks others for it."""

Start = Callable[["Program", Sequence[int]], int | None]
"""Starts a program and returns its process; None if that has to be done by Popen."""


class Program(Struct):
    """A module or a file of Python, its words, and its place among processes."""

    args: list[str]
    cwd: str
    env: dict[str, str]
    is_leader: bool
    group: int

    @property
    def parts(self) -> tuple[bool, str, list[str]]:
        """Whether it is a module; its name or path; its words."""
        arguments = self.args[2:] if self.args[1:2] == ["-P"] else self.args[1:]
        return (
            (True, arguments[1], arguments[2:])
            if arguments[0] == "-m"
            else (False, arguments[0], arguments[1:])
        )

    @property
    def can_be_forked(self) -> bool:
        """Whether it is of this repository, and loads the same libraries."""
        if self.args[0] != sys.executable or len(self.args) < 3 or differs(self.env, AT_START):
            return False
        package = Path(self.cwd, "mlxstack")
        if self.cwd != str(ROOT) and (package.exists() or not package.parent.is_dir()):
            return False
        is_module, name, _ = self.parts
        if is_module:
            return name.startswith(("mlxstack.", "tests."))
        return name == str(COMMAND) or (name.endswith(".py") and name.startswith(str(ROOT)))

    def place(self) -> None:
        """Take the place among processes."""
        if self.is_leader:
            os.setsid()
        if self.group >= 0:
            os.setpgid(0, self.group)

    def run(self, streams: Sequence[int]) -> NoReturn:
        """Be this program until it ends."""
        code: object = 1
        try:
            self._begin(streams)
            is_module, name, args = self.parts
            sys.argv = [name, *args]
            if is_module:
                main = name, f"{name}.__main__"
                _forget(
                    [module for module in main if not hasattr(sys.modules.get(module), "__path__")]
                )
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            elif name == SHAPES:
                remembered.answer_shapes()
            else:
                runpy.run_path(name, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if not isinstance(code, int):
                sys.stderr.write(f"{code}\n")
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            traceback.print_exc()
        finally:
            _end(code if isinstance(code, int) else 1)

    def _begin(self, streams: Sequence[int]) -> None:
        for target, fd in enumerate(streams):
            if fd not in {-1, target}:
                os.dup2(fd, target)
        os.closerange(N_STREAMS, os.sysconf("SC_OPEN_MAX"))
        _forget_signals()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(self.cwd)
        if differs(self.env, OF_HUB) and self.parts[1] not in WITHOUT_HUB:
            later = [name for name in sys.modules if name not in _of_commands]
            _forget([name for name in later if name.partition(".")[0] in HUB_USERS])
        os.environ.clear()
        os.environ.update(self.env)
        random.seed()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        sys.stdout.reconfigure(  # type: ignore[union-attr]
            line_buffering=os.isatty(1) or "PYTHONUNBUFFERED" in self.env
        )
        _entitle(self.args)


def differs(env: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    """Whether a variable of these prefixes is set, and is another one here."""
    names = {name for name in env if name.startswith(prefixes)} - LATER
    return any(env[name] != _env.get(name) for name in names)


def of_hub(env: Mapping[str, str]) -> HubVariables:
    """Variables that the hub's client reads when it is imported."""
    return frozenset((name, value) for name, value in env.items() if _is_of_hub(name))


def _is_of_hub(name: str) -> bool:
    return name.startswith(OF_HUB) and name not in LATER


@contextmanager
def preloaded(env: Mapping[str, str]) -> Iterator[None]:
    """Import once what programs with these variables of the hub need, for several programs."""
    if not CAN_FORK:
        yield
        return
    hub = of_hub(env)
    variables = {name: value for name, value in _env.items() if not _is_of_hub(name)}
    server, process = _start(variables | dict(hub))
    _servers[hub] = server
    try:
        yield
    finally:
        del _servers[hub]
        server.close()
        process.wait()


def install() -> None:
    """Let Popen ask for forked programs in this process."""
    if CAN_FORK:
        subprocess.Popen._execute_child = _popen(_ask_server)  # type: ignore[attr-defined]


def _popen(start: Start) -> Callable[..., None]:
    """Popen's way to start programs."""

    def execute_child(  # noqa: PLR0917
        self: Popen, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        """As in `subprocess`."""
        options = preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell
        pipes = p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        last = restore_signals, gid, gids, uid, umask, start_new_session, process_group
        if not isinstance(args, list | tuple) or executable or shell or pass_fds:
            return EXECUTE(self, args, executable, *options, *pipes, *last)
        program = Program(
            [os.fsdecode(word) for word in args],
            os.fsdecode(cwd) if cwd else str(Path.cwd()),
            dict(os.environ if env is None else env),
            start_new_session,
            process_group,
        )
        pid = start(program, (p2cread, c2pwrite, errwrite)) if program.can_be_forked else None
        if pid is None:
            return EXECUTE(self, args, executable, *options, *pipes, *last)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None

    return execute_child


_lock = threading.Lock()


def _ask_server(program: Program, streams: Sequence[int]) -> int:
    with _lock:
        server = _servers.get(of_hub(program.env)) or _server()
    return _ask(server, program, streams)


def _ask(server: socket.socket, program: Program, streams: Sequence[int]) -> int:
    """Have a program forked; it is a child of this process, to which its parent leaves it.

    Raises OSError or ValueError when the other process has ended.
    """
    libc = ctypes.CDLL(None)
    with _lock:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            fds = [own if fd == -1 else fd for own, fd in enumerate(streams)]
            args = program.args, program.cwd, program.env, program.is_leader, program.group
            socket.send_fds(server, [json.dumps(args).encode()], fds)
            return max(int(server.recv(MAX_BYTES)) for _ in range(2))
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that forks, which ends with this one."""
    ours, process = _start(_env)
    atexit.register(process.wait, 10)
    atexit.register(ours.close)
    return ours


def _start(env: Mapping[str, str]) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """A process that forks, until the connection to it is closed."""
    ours, theirs = _pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", "from tests import forked; forked.serve()", ROOM],
            env=env,
            cwd=ROOT,
            stdin=theirs,
        )
    return ours, process


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
    return pair


def serve() -> None:
    """Fork programs for the process at the other end of stdin, until it ends."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    sys.path[0] = str(ROOT)
    set_limit = resource.setrlimit
    # The import of mlx-lm would lower the limit of open files.
    resource.setrlimit = lambda *_: None
    _preload()
    resource.setrlimit = set_limit
    subprocess.Popen._execute_child = _popen(_start_from_program)  # type: ignore[attr-defined]
    _rehearse()
    _fork_for(connection)


def _fork_for(connection: socket.socket) -> None:
    """Fork what is asked for, as orphans, until the other end is closed."""
    while True:
        data, streams, _, _ = socket.recv_fds(connection, MAX_BYTES, N_STREAMS)
        if not data:
            return
        middle = os.fork()
        if not middle:
            if not os.fork():
                program = Program(*json.loads(data))
                program.place()
                connection.send(str(os.getpid()).encode())
                program.run(streams)
            os._exit(0)
        os.waitpid(middle, 0)
        connection.send(b"0")
        for fd in streams:
            os.close(fd)


def _start_from_program(program: Program, streams: Sequence[int]) -> int | None:
    if not _helpers:
        has_engine = any(thread.name == "mlx" for thread in threading.enumerate())
        return None if has_engine else _fork(program, streams)
    try:
        return _ask(_helpers[0], program, streams)
    except (OSError, ValueError):
        return None


def _fork_helper() -> None:
    """Fork a process that forks others, while this one has no engine yet."""
    if _helpers:
        return
    ours, theirs = _pair()
    _flush()
    if os.fork():
        theirs.close()
        _helpers.append(ours)
        return
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for target, fd in enumerate((null, null, null, theirs.fileno())):
            os.dup2(fd, target)
        os.closerange(N_STREAMS + 1, os.sysconf("SC_OPEN_MAX"))
        _forget_signals()
        _entitle(["forks", "programs"])
        _fork_for(socket.socket(fileno=N_STREAMS))
    finally:
        os._exit(0)


def _fork(program: Program, streams: Sequence[int]) -> int:
    """Fork a program from this one."""
    reader, writer = os.pipe()
    _flush()
    pid = os.fork()
    if not pid:
        program.place()
        program.run(streams)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return pid


def _flush() -> None:
    """Write what a fork would write again."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _forget_signals() -> None:
    """Handle signals, but Ctrl-C, as a new process does."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _preload() -> None:
    """Import what programs import, and note which of it the commands need."""
    from mlxstack import control, planner
    from mlxstack.cli import commands, main

    assert main.app
    for package in (commands, control, planner):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    _of_commands.update(sys.modules)
    assert not {"huggingface_hub", "mlx"} & _of_commands
    for name in MODULES:
        importlib.import_module(name)
    import mlx.core as mx
    import uvloop

    from tests import ring, self_checks

    self_checks.install()
    mx.distributed.init = ring.join
    run_loop = uvloop.run

    def run(main: Any) -> Any:
        # Before there is a loop: at a fork, uvloop closes the numbers of its descriptors.
        _fork_helper()
        return run_loop(main)

    uvloop.run = run


def _rehearse() -> None:
    """Do once what each command and each service does at its start, for what Python keeps of it."""
    import typer.main

    from mlxstack.api.app import create_app
    from mlxstack.cli.main import app
    from mlxstack.core.preset import ServerSpec
    from mlxstack.engine.model import model_shape
    from mlxstack.text.assembly import assemble_text
    from mlxstack.text.rendering.renderers import RENDERERS
    from tests.api.running import parse_handlers, standing

    make = functools.cache(lambda app, _shell_detection: get_command(app))
    get_command = typer.main.get_command
    typer.main.get_command = lambda app: make(app, os.environ.get(SHELL_DETECTION))
    typer.main.get_command(app)
    service, engine = standing(ServerSpec(port=0))
    parse_handlers()
    create_app(service)
    model_shape._remappings()
    assemble_text(engine.tokenizer)
    RENDERERS.close()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()


def _forget(names: Sequence[str]) -> None:
    """Let these modules be imported again."""
    for name in names:
        sys.modules.pop(name, None)
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(child, None)


def _entitle(args: Sequence[str]) -> None:
    """Show these words as the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[n]) for n in TITLE)
    line = "\0".join(args).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _end(code: int) -> NoReturn:
    """Exit as Python does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120
    os._exit(code)
