"""Downloads models from the hub, with progress."""

import time
from collections.abc import Sequence
from pathlib import Path

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ModelSpec
from mlxstack.host.load_progress import LoadProgress
from mlxstack.models import hub
from mlxstack.models.bounded_json import read_config_object
from mlxstack.models.model_files import whole_snapshot
from mlxstack.models.mtp_layouts import head_tensors
from mlxstack.models.transfer import Transfer

RUNNING: dict[str, Transfer] = {}
"""Downloads of this process by model."""


def fetch(spec: ModelSpec, progress: LoadProgress) -> Path:
    """Snapshot of a model, downloaded if missing. Raises SetupError."""
    progress.report(f"looking for {spec.id} on the hub")
    if (snapshot := whole_snapshot(spec.id, spec.revision)) is not None:
        return snapshot
    return _download(spec, hub.PATTERNS, progress)


def fetch_head(model: str, progress: LoadProgress) -> Path:
    """Snapshot with the weight files of an MTP head alone. Raises SetupError."""
    progress.report(f"looking for the MTP head of {model} on the hub")
    config = hub.fetch_config(model)
    head = head_tensors(read_config_object(config))
    names = hub.weight_files_with(model, head.is_of_head) if head is not None else []
    if not names:
        raise SetupError(f"model.mtp: {model} has no MTP head that is known here")
    if hub.is_cached(model, names):
        return config.parent
    return _download(ModelSpec(id=model), (*hub.BESIDE_WEIGHTS, *names), progress)


def _download(spec: ModelSpec, patterns: Sequence[str], progress: LoadProgress) -> Path:
    plan = hub.plan(spec.id, spec.revision, patterns)
    hub.check_disk(plan)
    transfer = Transfer(plan.n_missing, time.monotonic())

    def report(n_bytes: int) -> None:
        transfer.add(n_bytes)
        progress.report_seldom(f"downloading {spec.id}: {transfer.text(time.monotonic())}")

    RUNNING[spec.id] = transfer
    try:
        return hub.download(spec.id, spec.revision, report, patterns)
    finally:
        del RUNNING[spec.id]
