"""Commands of `mlx-stack`, each in a process forked from one that has imported the package.

A command with an interpreter of its own spends most of its time on imports. `run` starts one
process of this file per test process, which forks one for each command. Tests of signals, of a
terminal and of stdin start the installed program instead.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

N_PIPES = 3
"""Pipes of a command: the ids of its process and its exit code, its stdout, its stderr."""


def run(
    words: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, timeout: float = 180
) -> "subprocess.CompletedProcess[str]":
    """Run one command, as `subprocess.run` runs the program."""
    # Without `no_proxy`, the network library of macOS would be called in a forked process.
    variables = {"no_proxy": "*", **env} if sys.platform == "darwin" else dict(env)
    ends = [os.pipe() for _ in range(N_PIPES)]
    _server().send([list(words), variables, str(cwd or Path.cwd())], [w for _, w in ends])
    try:
        told, out, err = _read([r for r, _ in ends], time.monotonic() + timeout)
    finally:
        for r, _ in ends:
            os.close(r)
    code = int(told.split()[1])
    return subprocess.CompletedProcess(words, code, out.decode(), err.decode())


def answers(
    commands: Sequence[Sequence[str]], home: Path, **env: str
) -> "list[subprocess.CompletedProcess[str]]":
    """The ends of these commands, run one after the other with one home."""
    variables = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(home), "COLUMNS": "200", **env}
    return [run(words, variables, Path(__file__).parents[2]) for words in commands]


def _read(pipes: Sequence[int], end: float) -> list[bytes]:
    """The contents of the pipes, each read to its end; kills a command that takes too long."""
    contents = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                os.kill(int(contents[pipes[0]].split()[0]), signal.SIGKILL)
                raise TimeoutError(f"no end of the command; so far {contents}")
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                contents[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return [contents[pipe] for pipe in pipes]


class ForkServer:
    """The process that forks, seen from a test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def send(self, command: object, pipes: Sequence[int]) -> None:
        """Hand over a command and the ends of its pipes, which are closed here."""
        data = json.dumps(command).encode()
        with self._lock:
            socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], pipes)
            self._socket.sendall(data)
            for pipe in pipes:
                os.close(pipe)

    def close(self) -> None:
        """End it; it ends by itself when this process does."""
        self._socket.close()
        self._process.wait(10)


_server = functools.cache(ForkServer)


def _serve(connection: socket.socket) -> None:
    """Fork a process for each command until the tests are over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        size, pipes, _, _ = socket.recv_fds(connection, 4, N_PIPES)
        if not size:
            return
        data = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        if not os.fork():
            connection.close()
            _follow(json.loads(data), *pipes)
        for pipe in pipes:
            os.close(pipe)


def _follow(command: tuple[list[str], dict[str, str], str], told: int, *pipes: int) -> NoReturn:
    """Fork the command, and tell its process and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if not process:
        os.close(told)
        _run(*command, *pipes)
    for pipe in pipes:
        os.close(pipe)
    os.write(told, f"{process}\n".encode())
    os.write(told, f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n".encode())
    os._exit(0)


def _run(words: list[str], env: dict[str, str], cwd: str, out: int, err: int) -> NoReturn:
    """Run one command as the installed program does."""
    from mlxstack.cli.main import main

    code: object = 1
    try:
        for pipe, standard in ((out, 1), (err, 2)):
            os.dup2(pipe, standard)
            os.close(pipe)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        random.seed()
        sys.argv = ["mlx-stack", *words]
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _preload() -> None:
    """Import the modules of all commands, which import nothing that reads its environment then."""
    import mlxstack.cli

    for module in pkgutil.walk_packages(mlxstack.cli.__path__, "mlxstack.cli."):
        if module.name != "mlxstack.cli.verify":  # It computes with the engine itself.
            importlib.import_module(module.name)
    assert "huggingface_hub" not in sys.modules
    assert "mlx" not in sys.modules
    gc.freeze()


if __name__ == "__main__":
    _preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
