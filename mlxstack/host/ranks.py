"""Ranks of a service on several machines, started here or by SSH."""

import shlex
import subprocess
import sys
from ipaddress import ip_address

MODULE = "mlxstack.engine.distributed.follower"


def start(host: str, address: str, key: str) -> "subprocess.Popen[bytes]":
    """Start a rank on `host`, which connects to rank 0 at `address`."""
    process = subprocess.Popen(_command(host, address), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"{key}\n".encode())
    process.stdin.flush()
    return process


def shown(host: str, address: str) -> str:
    """The command that `start` runs, for a message."""
    return shlex.join(_command(host, address))


def is_here(host: str) -> bool:
    """Whether a rank of this name runs on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _command(host: str, address: str) -> list[str]:
    worker = [sys.executable, "-P", "-m", MODULE, address]
    if is_here(host):
        return worker
    return ["ssh", "-T", "-o", "BatchMode=yes", host, shlex.join(worker)]
