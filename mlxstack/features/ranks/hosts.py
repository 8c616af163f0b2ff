"""Ranks of a service on several machines, started here or by SSH."""

import shlex
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address
from typing import IO

MODULE = "mlxstack.features.ranks.follower"


def start(
    host: str, address: str, key: str, module: str = MODULE, output: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a rank on `host`, which connects to rank 0 at `address`.

    Another `module` is started the same way. The process writes to `output`, if given.
    """
    process = subprocess.Popen(
        _command(host, address, module),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
    )
    assert process.stdin is not None
    # A process that has ended already tells why by its output.
    with suppress(BrokenPipeError):
        process.stdin.write(f"{key}\n".encode())
    return process


def command_text(host: str, address: str) -> str:
    """The command that `start` runs, for a message."""
    return shlex.join(_command(host, address, MODULE))


def is_here(host: str) -> bool:
    """Whether a rank of this name runs on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _command(host: str, address: str, module: str) -> list[str]:
    worker = [sys.executable, "-P", "-m", module, address]
    if is_here(host):
        return worker
    return ["ssh", "-T", "-o", "BatchMode=yes", host, shlex.join(worker)]
