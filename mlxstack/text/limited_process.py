"""Child process that answers requests under limits of CPU time and memory.

Templates, grammars and tokenizers of a model's authors are programs. A thread in one of them
cannot be stopped; a process can.
"""

import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil

LOOK_S = 0.05
"""Seconds between two looks at the size of a child that has not answered."""
STALL_S = 60.0
"""Seconds for a request in all; a busy computer is no fault of the request."""
MAX_ANSWERED = 64 * 1024 * 1024
"""Maximum bytes of an answer."""
HEADER = struct.Struct(">d")
"""CPU seconds: allowed in a request, used in an answer."""
LENGTH = struct.Struct("!i")
"""Length of a message, as `multiprocessing.connection` writes it."""
CHUNK = 1 << 20
ENDING_S = 1.0
"""Seconds that a child which closed its pipe has to end."""
MIN_S = 0.001
"""Shortest limit; a timer of no time would be none."""
NICENESS = 5
"""Of children whose work may wait for prompts and tokens."""
NO_MEMORY = 77
"""Exit status of a child whose allocation was refused."""
OF_INTERPRETER = ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
"""Variables that a child gets: those with which Python finds its libraries and the local time."""


class Overrun(Exception):
    """A request ended its child; the text says by which limit."""


class Stalled(Overrun):
    """A request took too long in all, maybe on a busy computer."""


class ChildChannel:
    """Messages to a child and back, without blocking. Single owner."""

    def __init__(self, end: socket.socket, max_answered: int | None = None) -> None:
        self.max_answered = max_answered
        self._socket = end
        self._socket.setblocking(False)
        self._poll = select.poll()
        weakref.finalize(self, end.close)

    def send(self, data: bytes, waiting: Callable[[], None]) -> None:
        """Send a message.

        `waiting` is called while the child takes none; its errors are raised.
        """
        unsent = memoryview(LENGTH.pack(len(data)) + data)
        while unsent:
            self._wait(select.POLLOUT, waiting)
            with suppress(BlockingIOError):
                unsent = unsent[self._socket.send(unsent[:CHUNK]) :]

    def receive(self, waiting: Callable[[], None]) -> bytes:
        """The next message.

        Raises EOFError, Overrun for a large one, and errors of `waiting`.
        """
        (n_bytes,) = LENGTH.unpack(self._exactly(LENGTH.size, waiting))
        most = self.max_answered or MAX_ANSWERED
        if not 0 <= n_bytes <= most:
            raise Overrun(f"makes more than {most >> 20} MB")
        return self._exactly(n_bytes, waiting)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, n_bytes: int, waiting: Callable[[], None]) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            self._wait(select.POLLIN, waiting)
            with suppress(BlockingIOError):
                piece = self._socket.recv(min(CHUNK, n_bytes - len(data)))
                if not piece:
                    raise EOFError
                data += piece
        return bytes(data)

    def _wait(self, event: int, waiting: Callable[[], None]) -> None:
        self._poll.register(self._socket, event)
        while not self._poll.poll(LOOK_S * 1000):
            waiting()


class LimitedProcess:
    """Child running a module that calls `serve`.

    One thread uses it at a time. It is started by the first request, and again after an overrun.
    It may hold `max_bytes` of memory. An answer has `MAX_ANSWERED` bytes at most, or
    `max_answered`. `close` may be called by any thread.
    """

    def __init__(self, module: str, max_bytes: int, max_answered: int | None = None) -> None:
        self._max_answered = max_answered
        self._module = module
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ChildChannel | None = None

    def request(
        self, payload: bytes, limit_s: float, look: Callable[[float], None] | None = None
    ) -> tuple[bytes, float]:
        """The answer and its CPU seconds, of `limit_s`.

        `look` is called while the answer is not there, with the CPU seconds so far, those of
        the child's start included, and ends the child by an error. Raises Overrun, or OSError
        without a process.
        """
        try:
            before_s = cpu_seconds(self._process.pid) if self._process is not None else 0.0
            process, channel = self._running()
            deadline = time.monotonic() + STALL_S

            def waiting() -> None:
                check_size(process.pid, self._max_bytes)
                if look is not None:
                    look(cpu_seconds(process.pid) - before_s)
                if time.monotonic() > deadline:
                    raise Stalled(f"takes longer than {STALL_S:g} s")

            with suppress(ConnectionError):
                channel.send(HEADER.pack(limit_s) + payload, waiting)
            try:
                data = channel.receive(waiting)
            except (EOFError, ConnectionError):
                code = _exit_code(process)
                raise Overrun(describe_exit(code, limit_s, self._max_bytes)) from None
            return data[HEADER.size :], HEADER.unpack_from(data)[0]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the child."""
        process = self._process
        self._process = None
        if process is not None:
            _kill(process)

    def _running(self) -> "tuple[subprocess.Popen[bytes], ChildChannel]":
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None or self._channel is None:
            if self._channel is not None:
                self._channel.close()
            ours, end = socket.socketpair()
            self._channel = ChildChannel(ours, self._max_answered)
            # Without `close_fds` CPython may use posix_spawn, which copies no memory map.
            # Descriptors of Python are not inherited anyway.
            command = [sys.executable, "-m", self._module, str(self._max_bytes)]
            # A template that leaves its sandbox finds no key of the user.
            variables = {name: os.environ[name] for name in OF_INTERPRETER if name in os.environ}
            with end:
                self._process = subprocess.Popen(
                    command, stdin=end.fileno(), close_fds=False, env=variables
                )
            weakref.finalize(self, _kill, self._process)
        return self._process, self._channel


def check_size(pid: int, max_bytes: int) -> None:
    """Raise Overrun for a child that holds more than `max_bytes` of memory.

    For systems that keep no RLIMIT_DATA.
    """
    try:
        n_bytes = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return
    if n_bytes > max_bytes:
        raise Overrun(_too_big(max_bytes))


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a child has used; 0 when it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def describe_exit(code: int, limit_s: float, max_bytes: int) -> str:
    """The reason why a child under limits ended."""
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return f"takes longer than {limit_s:g} s of CPU time"
    # An allocator without a way to fail, as Rust's, aborts.
    if code in (NO_MEMORY, -signal.SIGABRT):
        return _too_big(max_bytes)
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _too_big(max_bytes: int) -> str:
    return f"takes more than {max_bytes / 2**30:g} GB of memory"


def _exit_code(process: "subprocess.Popen[bytes]") -> int:
    """Exit status of a child that closed its pipe."""
    try:
        return process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.returncode


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def to_parent() -> Connection:
    """The pipe of a child to its parent."""
    return Connection(sys.stdin.fileno())


def limit_memory(n_bytes: int) -> None:
    """Bound the memory of this process, if the kernel can.

    macOS refuses or ignores it; there the parent watches the size of its child.
    """
    for kind, limit in ((resource.RLIMIT_DATA, n_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))


def limit_cpu(limit_s: float) -> None:
    """Let the kernel end this process after further CPU seconds."""
    limit = math.ceil(time.process_time() + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def serve(answer: Callable[[bytes], bytes], pipe: Connection) -> None:
    """Answer every request of the parent until it ends.

    A request over its CPU seconds ends the process by SIGPROF, also inside C code.
    """
    # The default action of the timer's signal ends the process. Ctrl-C and a stop reach the whole
    # group, but the parent, which may drain, decides when this process ends.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        while True:
            request = pipe.recv_bytes()
            (limit_s,) = HEADER.unpack_from(request)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, max(limit_s, MIN_S))
            result = answer(request[HEADER.size :])
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(HEADER.pack(time.process_time() - began) + result)
    except MemoryError:
        os._exit(NO_MEMORY)
    except (EOFError, ConnectionError):
        os._exit(0)
