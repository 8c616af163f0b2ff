"""Parent watchdog: the worker exits when its supervisor is gone."""

import os
import signal
import threading
import time
from collections.abc import Mapping

VARIABLE = "MLX_STACK_LIFELINE"


def follow_supervisor(env: Mapping[str, str]) -> None:
    """Watch the supervisor's pipe, and end with it; otherwise no-op.

    At its end, however the supervisor died, this process gets SIGTERM to drain, and is ended
    for good after the seconds that the supervisor put into the variable.
    """
    grace = env.get(VARIABLE)
    if grace is not None:
        threading.Thread(target=_watch, args=(float(grace),), daemon=True).start()


def _watch(grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)
