"""`python -m tests.mac.faulty_worker PRESET_JSON HOME`: a service whose device fails.

The GPU fails for ever after SIGUSR1, or from the load on if FAULTY is set.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from mlxstack.api.server import run
from mlxstack.core.preset import Preset
from tests.mac.device_faults import DENIED, FOR_EVER, DeviceFaults

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    faults = DeviceFaults()
    signal.signal(signal.SIGUSR1, lambda *_: faults.fail(FOR_EVER, text=DENIED))
    if os.environ.get("FAULTY"):
        faults.fail(FOR_EVER, text=DENIED)
    preset = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Preset)
    sys.exit(run(preset, Path(sys.argv[2])))
