"""Listening socket and web server of a process."""

import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from mlxstack.api.connection_limits import BoundedConnection
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ServerSpec

# The event loop accepts all that wait before the first of them is counted: fewer than the
# descriptors that `connection_limit` leaves.
BACKLOG = 512
# Longer than clients keep an idle connection, so that no request meets one that is closing.
KEEP_ALIVE_S = 75


class UvicornServer(uvicorn.Server):
    """uvicorn server without signal handlers, which would end the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to `run`."""
        yield


def uvicorn_config(app: Any, **limits: Any) -> uvicorn.Config:
    """Configuration of uvicorn over bounded connections."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedConnection,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        **limits,
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
