"""Downloads models from the hub, with progress in the log."""

import logging
import time
from pathlib import Path

from mlxstack.core.preset import ModelSpec
from mlxstack.host import hub
from mlxstack.host.model_files import whole_snapshot
from mlxstack.host.transfer import Transfer

log = logging.getLogger(__name__)

EVERY_S = 2.0
RUNNING: dict[str, Transfer] = {}
"""Downloads of this process by model."""


def fetch(spec: ModelSpec, every_s: float = EVERY_S) -> Path:
    """Snapshot of a model, downloaded if missing. Raises SetupError."""
    log.info("looking for %s on the hub", spec.id)
    if (snapshot := whole_snapshot(spec.id, spec.revision)) is not None:
        return snapshot
    plan = hub.plan(spec.id, spec.revision)
    hub.check_disk(plan)
    transfer = Transfer(plan.n_missing, time.monotonic())
    logged = time.monotonic()

    def report(n_bytes: int) -> None:
        nonlocal logged
        now = time.monotonic()
        transfer.add(n_bytes)
        if now - logged >= every_s:
            logged = now
            log.info("downloading %s: %s", spec.id, transfer.text(now))

    RUNNING[spec.id] = transfer
    try:
        return hub.download(spec.id, spec.revision, report)
    finally:
        del RUNNING[spec.id]
