"""`python -m mlxstack.gateway SPEC`: the worker of a gateway."""

import logging
import os
import sys
from pathlib import Path

from mlxstack.gateway.server import CANNOT_START, run
from mlxstack.gateway.spec import GatewaySpec
from mlxstack.host.descriptors import raise_soft_limit
from mlxstack.host.parent_watchdog import follow_supervisor
from mlxstack.host.service_state import read_json


def main() -> int:
    """Read the spec and serve."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level="INFO")
    logging.getLogger("httpx").setLevel("WARNING")
    follow_supervisor(os.environ)
    spec = read_json(Path(sys.argv[1]), GatewaySpec)
    if spec is None:
        logging.error("%s is no spec of a gateway", sys.argv[1])
        return CANNOT_START
    raise_soft_limit()
    return run(spec)


if __name__ == "__main__":
    sys.exit(main())
