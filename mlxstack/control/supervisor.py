"""Supervisor of one worker: start, log, liveness, backoff restarts, crash limit."""

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from mlxstack.core.errors import StackError
from mlxstack.host import log_lines
from mlxstack.host.log_lines import LogLine
from mlxstack.host.logs import RotatingLog
from mlxstack.host.parent_watchdog import VARIABLE
from mlxstack.host.process import ProcessId, identify
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import (
    Phase,
    ServiceFiles,
    ServiceSpec,
    ServiceState,
    claim,
    read_json,
    release,
    write_json,
)

LOADING = "Loading model"
"""Answers of llama-server and ours during loads, which may take hours."""

N_LAST_LINES = 20

SIGTERM_IGNORED_S = 6.0
"""Seconds after which a worker that still calls itself well ignores SIGTERM."""

PROBE_S = 1.0

NATIVE_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
"""Signals by which native code ends its process, also after a refused allocation."""

FILES_S = 1.0
"""Seconds between two looks at the files of the service."""


class HealthProbe(Struct, frozen=True):
    """Result of /health."""

    is_well: bool = False
    """Status below 500, or loading; a worker that refuses this request is alive too."""
    message: str | None = None
    """Message of an error, "" without one; None when there was no answer at all."""


def probe(url: str, timeout_s: float) -> HealthProbe:
    """Probe a worker's health with timeout `timeout_s` per phase."""
    try:
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)) as caller:
            caller.request("GET", "/health")
            answer = caller.getresponse()
            message = _error_message(answer.read())
            return HealthProbe(answer.status < 500 or message == LOADING, message)
    except (OSError, HTTPException):
        return HealthProbe()


class LivenessMonitor:
    """Health polls of one worker, one every `look_s` seconds.

    Probes are counted instead of seconds: a computer that sleeps is not stuck.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._has_answered = False
        self._n_silent = 0
        self._n_unhealthy = 0

    def observe(self, heartbeat: HealthProbe) -> str | None:
        """Reason why the worker now counts as stuck, else None."""
        policy = self._policy
        if heartbeat.message is None:
            self._n_silent += 1
        else:
            self._has_answered = True
            self._n_silent = 0
        if heartbeat.is_well:
            self._n_unhealthy = 0
        else:
            self._n_unhealthy += 1
        if self._has_answered and self._n_silent * policy.look_s >= policy.silent_s:
            return f"has not answered for {policy.silent_s:g} s"
        if self._n_unhealthy * policy.look_s < policy.stuck_s:
            return None
        reason = "it has not answered"
        if heartbeat.message is not None:
            reason = f"last error: {heartbeat.message}"
        return f"was unhealthy for {policy.stuck_s:g} s ({reason})"


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


class Supervisor:
    """One service from start to end; `echo` gets the log lines."""

    def __init__(self, spec: ServiceSpec, echo: Callable[[str], None] | None = None) -> None:
        process = identify(os.getpid())
        assert process is not None
        self._spec = spec
        self._state = ServiceState(
            spec=spec, phase=Phase.STARTING, supervisor=process, since=time.time()
        )
        self._echo = echo
        self._stop = asyncio.Event()
        self._crash_times: list[float] = []

    def claim(self) -> None:
        """Claim the service's name. Raises Taken for another supervisor's."""
        claim(self._state)

    async def run(self) -> int:
        """Supervise a claimed service: 0 after a stop, 1 after crashes."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        try:
            with closing(RotatingLog(self._spec.home.log_file(self._spec.name))) as self._log:
                keeping = asyncio.create_task(self._keep_files())
                end = await self._keep_alive()
                keeping.cancel()
                self._record_state(phase=end, worker=None)
        finally:
            release(self._spec.home, self._spec.name)
        if end is Phase.STOPPED:
            return 0
        return 1

    async def _keep_alive(self) -> Phase:
        while not self._stop.is_set():
            code = await self._run_worker()
            if self._stop.is_set() or code == 0:
                break
            if code == os.EX_CONFIG:
                self._log_message("worker exited with a configuration error; not restarting")
                return Phase.CRASHED
            delay = self._next_delay(time.monotonic())
            if delay is None:
                policy = self._spec.policy
                self._log_message(
                    f"the worker died {policy.max_crashes} times within {policy.window_s:g} s; "
                    "giving up; see the log above"
                )
                return Phase.CRASHED
            self._log_message(f"starting again in {delay:g} s")
            self._record_state(phase=Phase.WAITING)
            await self._wait_or_stop(delay)
        return Phase.STOPPED

    async def _keep_files(self) -> None:
        """Restore the record of the service if its folder was deleted."""
        files = ServiceFiles(self._spec.home, self._spec.name)
        while True:
            await asyncio.sleep(FILES_S)
            with suppress(OSError, StackError):
                files.keep()
                if files.restore(self._state):
                    self._log_message(
                        f"{self._spec.home.run} was deleted; its files are written again"
                    )

    async def _run_worker(self) -> int:
        """Start a worker and see it to its end; its exit code."""
        process = await self._start()
        pump = asyncio.create_task(self._pump(process))
        stopping = asyncio.create_task(self._stop.wait())
        ending = asyncio.create_task(process.wait())
        sticking = asyncio.create_task(self._until_stuck())
        watched = {stopping, ending, sticking}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stuck = None
        if stopping.done() and not ending.done():
            await self._end(process, ending)
        elif sticking.done() and not ending.done():
            stuck = sticking.result()
            self._log_message(f"worker {process.pid} {stuck}; killing it")
            process.kill()
        stopping.cancel()
        sticking.cancel()
        await self._drain(pump)
        code = await ending
        if not self._stop.is_set():
            self._record_exit(process.pid, code, stuck)
        return code

    async def _until_stuck(self) -> str:
        """Probe until the worker counts as stuck; returns the reason."""
        interval_s = self._spec.policy.look_s
        monitor = LivenessMonitor(self._spec.policy)
        while True:
            await asyncio.sleep(interval_s)
            reason = monitor.observe(await asyncio.to_thread(probe, self._spec.url, interval_s))
            if reason is not None:
                return reason

    async def _start(self) -> Process:
        grace = {VARIABLE: str(self._spec.policy.grace_s)}
        process = await asyncio.create_subprocess_exec(
            *self._spec.worker,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | self._spec.env | grace,
            process_group=0,
        )
        self._log_message(f"worker {process.pid} started")
        worker = identify(process.pid) or ProcessId(process.pid, 0.0)
        self._record_state(phase=Phase.RUNNING, worker=worker, since=time.time())
        return process

    async def _end(self, process: Process, ending: "asyncio.Task[int]") -> None:
        self._record_state(phase=Phase.STOPPING)
        self._log_message(f"stopping worker {process.pid}")
        process.terminate()
        grace = self._spec.policy.grace_s
        first = min(SIGTERM_IGNORED_S, grace)
        done, _ = await asyncio.wait({ending}, timeout=first)
        if not done and (await asyncio.to_thread(probe, self._spec.url, PROBE_S)).is_well:
            # A worker that drains or saves is unwell or takes no connections.
            grace = first
        elif not done:
            done, _ = await asyncio.wait({ending}, timeout=grace - first)
        if not done:
            self._log_message(f"worker {process.pid} did not stop within {grace:g} s; killing it")
            process.kill()
            await ending

    async def _pump(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            self._write(line)

    async def _drain(self, pump: "asyncio.Task[None]") -> None:
        """Last output lines; a grandchild's open pipe does not block."""
        _, pending = await asyncio.wait({pump}, timeout=1.0)
        for task in pending:
            task.cancel()

    def _record_exit(self, pid: int, code: int, stuck: str | None) -> None:
        description = _describe_exit(code, was_stuck=stuck is not None)
        lines = tuple(self._log.last_lines)
        # Other ranks and native code may print many lines after an error.
        errors = [line for line in lines[:-N_LAST_LINES] if log_lines.read(line).is_error][-1:]
        self._log_message(f"worker {pid} {description}")
        self._record_state(
            worker=None,
            exit_code=code,
            exit_summary=f"{stuck} and {description}" if stuck else description,
            last_log_lines=(*errors, *lines[-N_LAST_LINES:]),
            n_crashes=self._state.n_crashes + 1,
        )

    def _next_delay(self, now: float) -> float | None:
        """Seconds until the next start; None after too many crashes."""
        policy = self._spec.policy
        self._crash_times = [
            time_s for time_s in self._crash_times if now - time_s < policy.window_s
        ]
        self._crash_times.append(now)
        if len(self._crash_times) >= policy.max_crashes:
            return None
        return min(policy.first_s * 2.0 ** (len(self._crash_times) - 1), policy.longest_s)

    async def _wait_or_stop(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _log_message(self, message: str) -> None:
        line = LogLine(
            time=datetime.now().astimezone(),
            level="INFO",
            source=log_lines.SUPERVISOR,
            message=message,
            fields={"pid": os.getpid()},
        )
        self._write(log_lines.text_of(line))

    def _write(self, line: str) -> None:
        self._log.write(line)
        if self._echo is not None:
            self._echo(line)

    def _record_state(self, **changes: object) -> None:
        """Write the current state; a disk error only costs the file."""
        self._state = msgspec.structs.replace(self._state, **changes)
        file = self._spec.home.state_file(self._spec.name)
        try:
            write_json(file, self._state)
        except OSError as error:
            self._log_message(
                f"{file} cannot be written ({error.strerror}); `status` may be outdated"
            )


def _describe_exit(code: int, *, was_stuck: bool) -> str:
    """Description of a worker's end; the supervisor kills a stuck one."""
    if code >= 0:
        return f"exited with {code}"
    number = signal.Signals(-code)
    words = f"was killed by {number.name}"
    if number is signal.SIGKILL and not was_stuck:
        return f"{words}, as when memory runs out"
    if number in NATIVE_FAULTS:
        return f"{words}: native code failed, as when memory runs out"
    return words


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    tail = b""
    while chunk := await stream.read(65536):
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r").decode(errors="replace")
    if tail:
        yield tail.decode(errors="replace")


def main() -> int:
    """`python -m mlxstack.control.supervisor SPEC`: what `up` leaves behind."""
    os.umask(0o077)
    spec = read_json(Path(sys.argv[1]), ServiceSpec)
    if spec is None:
        sys.stderr.write(f"cannot read service spec {sys.argv[1]}\n")
        return 1
    try:
        supervisor = Supervisor(spec)
        supervisor.claim()
        return asyncio.run(supervisor.run())
    except StackError as error:
        sys.stderr.write(f"error: {error.message}\n")
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
