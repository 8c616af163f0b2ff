"""Runs one service in this process: binds, loads, serves, drains."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from math import ceil
from pathlib import Path

import uvicorn
import uvloop

from mlxstack.api.app import create_app
from mlxstack.api.dialects.openai_chat.messages import read_message_file
from mlxstack.api.host_rules import cors_middleware
from mlxstack.api.listener import UvicornServer, bind, uvicorn_config
from mlxstack.api.swap_middleware import swap_gate_middleware
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.preset import Preset
from mlxstack.engine.device import has_gpu
from mlxstack.service.assembly import assemble
from mlxstack.service.calls.background_tasks import run_tasks
from mlxstack.service.service import ANSWER_S, Service

log = logging.getLogger("mlxstack.serve")

# After the drain, requests need a moment to say why they ended: longer than the service gives
# them before it ends them itself, or uvicorn would cut them off without a word.
GRACE_S = ceil(ANSWER_S) + 3
# The MLX thread comes back from MLX a few times per step, of 10 ms on a GPU. Beside a thread that
# renders a prompt it waits for the interpreter each time, by default 5 ms.
SWITCH_INTERVAL_S = 0.0005
# A thread that is stuck in a template or a grammar does not delay the exit.
EXIT_S = 2.0


def run(preset: Preset, home: Path, source: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or 78 for bad configuration.

    `source` is the file of the preset; a change of the model rewrites it.
    """
    # Full collections skip imported modules, so that they are cheap and come before many
    # requests have left cycles. What loads later is not frozen: unloading a model must free it.
    gc.freeze()
    if has_gpu():
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return uvloop.run(_run(preset, home, source))
    except SetupError as error:
        log.error("%s", error.message)
        return os.EX_CONFIG
    except StackError as error:
        log.error("%s", error.message)
        return 1


async def _run(preset: Preset, home: Path, source: Path | None) -> int:
    with bind(preset.server) as listener:
        service = assemble(preset, home, read_message_file, source)
        server = UvicornServer(config(service))
        leaving = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, leaving.set)
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        code = await serve(service, server, listener, leaving)
        _leave(service, code)
        return code


def _leave(service: Service, code: int) -> None:
    """Exit within EXIT_S, at once while MLX computes.

    A normal exit would abort there.
    """
    if service.is_engine_left:
        log.warning("engine did not stop in time; unsaved KV is lost")
        logging.shutdown()
        os._exit(code)
    watchdog = threading.Timer(EXIT_S, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()


async def serve(
    service: Service, server: uvicorn.Server, listener: socket.socket, leaving: asyncio.Event
) -> int:
    """Serve on a bound socket until `leaving`; returns the exit code.

    It is 1 when the engine dies, or the web server ends, without having been asked to.
    """
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
        if isinstance(error, SetupError):
            return os.EX_CONFIG
        return 1
    finally:
        tasks.cancel()
        server.should_exit = True
        waiting.cancel()
        dying.cancel()
        await service.stop(service.preset.server.drain_s)
        await asyncio.gather(serving, loading, return_exceptions=True)


def config(service: Service) -> uvicorn.Config:
    server = service.preset.server
    app = cors_middleware(server, swap_gate_middleware(service, create_app(service)))
    return uvicorn_config(app, timeout_graceful_shutdown=ceil(server.drain_s) + GRACE_S)
