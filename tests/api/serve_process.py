"""A service in a process of its own: `python -m tests.api.serve_process PRESET HOME`."""

import logging
import sys
from pathlib import Path

import msgspec

from mlxstack.api.server import run
from mlxstack.core.preset import Preset

MODULE = "tests.api.serve_process"

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    preset = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Preset)
    sys.exit(run(preset, Path(sys.argv[2])))
