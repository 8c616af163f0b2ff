"""Rings of MLX whose ranks sleep while they wait for another one.

MLX reads the sockets of a ring without a pause: each rank that waits would take a core. A read that
ends after `READ_S` without data is one more of them to MLX.
"""

import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

READ_S = 0.005
JOIN = mx.distributed.init


def join(*args: Any, **more: Any) -> Any:
    """`mx.distributed.init`, and the sockets of its ring wait for data."""
    world = JOIN(*args, **more)
    hostfile = os.environ.get("MLX_HOSTFILE")
    if hostfile and sys.platform == "linux":
        ranks = [address.rpartition(":") for (address,) in json.loads(Path(hostfile).read_text())]
        addresses = {(host, int(port)) for host, _, port in ranks}
        for file in Path("/proc/self/fd").iterdir():
            _wait_for_data(int(file.name), addresses)
    return world


def _wait_for_data(fd: int, addresses: set[tuple[str, int]]) -> None:
    """Let reads and writes of a socket block for a while, if it is of this ring."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if (
                connection.family is socket.AF_INET
                and {connection.getsockname(), connection.getpeername()} & addresses
            ):
                wait = struct.pack("ll", 0, int(READ_S * 1e6))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
                connection.setblocking(True)
    except OSError:
        pass  # no socket, or one without a peer
