"""Ports for servers of the tests that another process binds later.

The tests of one worker of pytest-xdist get other ports than those of the next, and none that the
system or the service gives out, so that nothing else listens there in between.
"""

import itertools
import os

from mlxstack.host.process import refusal

HOST = "127.0.0.1"
FIRST = 10_000
N_PER_WORKER = 500
MAX_WORKERS = 20

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MAX_WORKERS
_first = FIRST + _worker * N_PER_WORKER
_own = itertools.cycle(range(_first, _first + N_PER_WORKER))
# Other runs at the same time begin elsewhere.
_ports = itertools.islice(_own, os.getpid() % N_PER_WORKER, None)


def unused_port() -> int:
    """A port where nothing listens, another one at every call."""
    return next(port for port in _ports if refusal(HOST, port) is None)
