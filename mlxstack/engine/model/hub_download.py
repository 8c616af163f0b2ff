"""Brings a model from the hub, and says how far it is: in the log, where `up` reads it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from mlx_lm import utils as mlx_utils

from mlxstack.core.formatting import size
from mlxstack.core.preset import ModelSpec

log = logging.getLogger(__name__)

EVERY_S = 2.0


def fetch(spec: ModelSpec, every_s: float = EVERY_S) -> Path:
    """The hub's snapshot of a model, downloaded if it is not here. Raises what the hub raises.

    The hub's own progress bars are only drawn on a terminal.
    """
    files = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=spec.id, repo_type="model") / "blobs"
    log.info("looking for %s on the hub", spec.id)
    with _telling(spec.id, files, every_s):
        return Path(mlx_utils._download(spec.id, revision=spec.revision))


@contextmanager
def _telling(name: str, folder: Path, every_s: float) -> Iterator[None]:
    """Log what has come in since the beginning, again and again, when it has become more."""
    over, before = threading.Event(), _bytes(folder)

    def tell() -> None:
        told = 0
        while not over.wait(every_s):
            now = _bytes(folder) - before
            if now > told:
                told = now
                log.info("downloading %s: %s so far", name, size(now))

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bytes(folder: Path) -> int:
    """Of all files that are there; a file may be renamed while we look."""
    sizes = 0
    for file in folder.glob("*"):
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue
    return sizes
