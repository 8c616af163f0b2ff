"""Runs one service in this process: binds, loads, serves, drains."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Generator
from math import ceil
from pathlib import Path

import uvicorn

from mlxstack.api.app import create_app
from mlxstack.api.connection import AcceptReporter, BoundedConnection
from mlxstack.api.swap_middleware import swap_gate_middleware
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.preset import Preset, ServerSpec
from mlxstack.service.background_tasks import run_tasks
from mlxstack.service.engine_factory import assemble
from mlxstack.service.service import ANSWER_S, Service

log = logging.getLogger("mlxstack.serve")

BACKLOG = 2048
# asyncio accepts this many at once, before the first of them is counted.
ACCEPTED_AT_ONCE = 128
# Longer than clients keep an idle connection, so that no request meets one that is closing.
KEEP_ALIVE_S = 75
# After the drain, requests need a moment to say why they ended: longer than the service gives
# them before it ends them itself, or uvicorn would cut them off without a word.
GRACE_S = ceil(ANSWER_S) + 3
# A thread that is stuck in a template or a grammar does not delay the exit.
EXIT_S = 2.0
# Request head; its longest lines are keys and cookies.
MAX_HEAD_BYTES = 64 * 1024

# EX_CONFIG of sysexits.h: a restart would not help.
CANNOT_START = 78


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to `run`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a queue in the kernel that is longer than asyncio's turns of accepting."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def run(preset: Preset, home: Path, source: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or 78 when a restart would not help.

    `source` is the file of the preset; a change of the model rewrites it.
    """
    try:
        return asyncio.run(_run(preset, home, source))
    except SetupError as error:
        log.error("%s", error.message)
        return CANNOT_START
    except StackError as error:
        log.error("%s", error.message)
        return 1


async def _run(preset: Preset, home: Path, source: Path | None) -> int:
    with bind(preset.server) as listener:
        service = assemble(preset, home, source)
        server = UvicornServer(config(service))
        leaving = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, leaving.set)
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        code = await serve(service, server, listener, leaving)
        _leave(service, code)
        return code


def _leave(service: Service, code: int) -> None:
    """Exit within EXIT_S, at once while MLX computes: a normal exit would abort there."""
    if service.is_engine_left:
        log.warning("the engine has not ended its step; what it has not saved yet is lost")
        logging.shutdown()
        os._exit(code)
    watchdog = threading.Timer(EXIT_S, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()


async def serve(
    service: Service, server: uvicorn.Server, listener: socket.socket, leaving: asyncio.Event
) -> int:
    """Serve on a bound socket until `leaving` is set; the exit code of the process.

    It is 1 when the engine dies, or the web server ends, without having been asked to.
    """
    asyncio.get_running_loop().set_exception_handler(AcceptReporter())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waiting = asyncio.create_task(leaving.wait())
    loading = asyncio.create_task(service.start())
    dying = asyncio.create_task(service.died.wait())
    tasks = asyncio.create_task(asyncio.sleep(0))
    try:
        await asyncio.wait({loading, waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            log.info("%s is ready", (await loading).id)
            tasks = asyncio.create_task(run_tasks(service))
            ends = {waiting, serving, dying}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return 0
        log.error("%s: the service ends", service.trouble or "the web server has stopped")
        return 1
    except StackError as error:
        log.error("%s", error.message)
        return CANNOT_START if isinstance(error, SetupError) else 1
    finally:
        tasks.cancel()
        server.should_exit = True
        waiting.cancel()
        dying.cancel()
        await service.stop(service.preset.server.drain_s)
        await asyncio.gather(serving, loading, return_exceptions=True)


def config(service: Service) -> uvicorn.Config:
    drain_s = service.preset.server.drain_s
    return uvicorn.Config(
        swap_gate_middleware(service, create_app(service)),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedConnection,
        backlog=ACCEPTED_AT_ONCE,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=ceil(drain_s) + GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def bind(server: ServerSpec) -> socket.socket:
    """Raises SetupError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; without, every answer waits for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; "
            "choose another server.port"
        ) from error
    listener.listen(BACKLOG)
    return listener
