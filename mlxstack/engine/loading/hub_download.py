"""Downloads models from the hub, with progress in the log."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ModelSpec
from mlxstack.models import hub
from mlxstack.models.model_files import head_tensors, read_config_object, whole_snapshot
from mlxstack.models.transfer import Transfer

log = logging.getLogger(__name__)

EVERY_S = 2.0
RUNNING: dict[str, Transfer] = {}
"""Downloads of this process by model."""


def fetch(spec: ModelSpec) -> Path:
    """Snapshot of a model, downloaded if missing. Raises SetupError."""
    log.info("looking for %s on the hub", spec.id)
    if (snapshot := whole_snapshot(spec.id, spec.revision)) is not None:
        return snapshot
    return _download(spec, hub.PATTERNS)


def fetch_head(model: str) -> Path:
    """Snapshot with the weight files of an MTP head alone. Raises SetupError."""
    log.info("looking for the MTP head of %s on the hub", model)
    config = hub.fetch_config(model)
    head = head_tensors(read_config_object(config))
    names = hub.weight_files_with(model, head.is_of_head) if head is not None else []
    if not names:
        raise SetupError(f"model.mtp: {model} has no MTP head that is known here")
    if hub.is_cached(model, names):
        return config.parent
    return _download(ModelSpec(id=model), (*hub.BESIDE_WEIGHTS, *names))


def _download(spec: ModelSpec, patterns: Sequence[str]) -> Path:
    plan = hub.plan(spec.id, spec.revision, patterns)
    hub.check_disk(plan)
    transfer = Transfer(plan.n_missing, time.monotonic())
    logged = time.monotonic()

    def report(n_bytes: int) -> None:
        nonlocal logged
        now = time.monotonic()
        transfer.add(n_bytes)
        if now - logged >= EVERY_S:
            logged = now
            log.info("downloading %s: %s", spec.id, transfer.text(now))

    RUNNING[spec.id] = transfer
    try:
        return hub.download(spec.id, spec.revision, report, patterns)
    finally:
        del RUNNING[spec.id]
