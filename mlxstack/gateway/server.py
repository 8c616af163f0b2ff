"""Gateway process: binds, serves, and stops its members."""

import asyncio
import logging
import os
import signal
from math import ceil

import uvloop

from mlxstack.api.host_rules import cors_middleware
from mlxstack.api.listener import UvicornServer, bind, uvicorn_config
from mlxstack.core.errors import SetupError
from mlxstack.gateway.app import Gateway
from mlxstack.gateway.members import Members
from mlxstack.gateway.spec import GatewaySpec, home_of
from mlxstack.host.heap import trim_heap
from mlxstack.host.services import read_json

log = logging.getLogger("mlxstack.gateway")

REST_S = 10.0
"""Seconds between looks at whether freed memory can be returned."""


def run(spec: GatewaySpec) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or 78 (bad configuration)."""
    try:
        uvloop.run(_run(spec))
    except SetupError as error:
        log.error("%s", error.message)
        return os.EX_CONFIG
    return 0


def web_server(spec: GatewaySpec, members: Members) -> UvicornServer:
    """Web server of a gateway over these members."""
    app = cors_middleware(spec.server, Gateway(spec, members))
    return UvicornServer(uvicorn_config(app, timeout_graceful_shutdown=ceil(spec.server.drain_s)))


async def return_memory(members: Members) -> None:
    """Return freed memory to the system after requests, once none is inside."""
    n_before = 0
    while True:
        await asyncio.sleep(REST_S)
        gates = members.by_name.values()
        n_requests = sum(gate.n_requests for gate in gates)
        if n_requests != n_before and not any(gate.n_active for gate in gates):
            n_before = n_requests
            await asyncio.to_thread(trim_heap)


async def _run(spec: GatewaySpec) -> None:
    with bind(spec.server) as listener:
        leaving = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leaving.set)
        members = Members(spec)
        server = web_server(spec, members)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        residing = asyncio.create_task(members.run())
        waiting = asyncio.create_task(leaving.wait())
        returning = asyncio.create_task(return_memory(members))
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        await asyncio.wait({serving, residing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        is_asked = waiting.done()
        waiting.cancel()
        server.should_exit = True
        await serving
        returning.cancel()
        residing.cancel()
        await asyncio.gather(residing, return_exceptions=True)
        if is_asked:
            now = read_json(home_of(spec).gateway_file(spec.name), GatewaySpec)
            await members.stop(now.handed_over if now is not None else ())
        else:
            log.error("the web server or the residency has stopped; the gateway ends")
            raise SystemExit(1)
