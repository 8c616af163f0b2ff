"""`python -m mlxstack.gateway SPEC`: the worker of a gateway."""

import logging
import os
import sys
from pathlib import Path

from msgspec.structs import replace

from mlxstack.gateway.server import run
from mlxstack.gateway.spec import GatewaySpec
from mlxstack.host.descriptors import raise_soft_limit
from mlxstack.host.log_lines import log_as_json
from mlxstack.host.parent_watchdog import follow_supervisor
from mlxstack.host.services import read_json, write_json


def main() -> int:
    """Read the spec and serve."""
    log_as_json()
    follow_supervisor(os.environ)
    file = Path(sys.argv[1])
    spec = read_json(file, GatewaySpec)
    if spec is None:
        logging.error("%s is no spec of a gateway", file)
        return os.EX_CONFIG
    # What an earlier gateway of this name handed over is this one's again.
    spec = replace(spec, handed_over=())
    write_json(file, spec)
    raise_soft_limit()
    return run(spec)


if __name__ == "__main__":
    sys.exit(main())
