"""Download of weight files that goes on inside a file.

The hub's client begins a file again after a kill. Here a file grows in the client's cache under a
name of its own, goes on by an HTTP range request of the client, and gets its final name, which is
the SHA-256 of its bytes, once they have been hashed.
"""

import hashlib
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from msgspec import Struct
from tqdm import tqdm  # type: ignore[import-untyped]

from mlxstack.core.errors import SetupError

WEIGHTS = ".safetensors"
PART = ".part.incomplete"
N_AT_ONCE = 4
SHA256 = re.compile(r"[0-9a-f]{64}")

Report = Callable[[int], None]


class WeightFile(Struct, frozen=True):
    """Missing weight file of the hub; `blob` is its final path."""

    url: str
    n_bytes: int
    blob: Path
    lock: Path

    @property
    def part(self) -> Path:
        """File that grows until it is whole."""
        return self.blob.with_name(self.blob.name + PART)

    @property
    def n_here(self) -> int:
        """Bytes that earlier downloads brought."""
        if self.part.exists():
            return self.part.stat().st_size
        return 0


def blobs_folder(model: str) -> Path:
    """Folder of the hub's client for the bytes of a repository."""
    return Path(constants.HF_HUB_CACHE) / _folder_name(model) / "blobs"


def missing_weights(model: str, revision: str | None, names: Sequence[str]) -> list[WeightFile]:
    """Files with hashes from the hub; others stay to its client."""
    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    locks = Path(constants.HF_HUB_CACHE) / ".locks" / _folder_name(model)
    files = [
        WeightFile(
            hf_hub_url(model, sibling.rfilename, revision=info.sha),
            sibling.lfs.size,
            blobs_folder(model) / _checked(sibling.lfs.sha256, sibling.rfilename),
            locks / f"{sibling.lfs.sha256}.lock",
        )
        for sibling in info.siblings or ()
        if sibling.rfilename in names
        and sibling.lfs is not None
        and sibling.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    ]
    return [file for file in files if not file.blob.exists()]


def fetch_weights(files: Sequence[WeightFile], report: Report) -> None:
    """Complete these files in parallel; an interrupt keeps partial files."""
    stop = Event()
    counting = meter(report, stop=stop)
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        try:
            for _ in pool.map(lambda file: _fetch(file, counting), files):
                pass
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def meter(report: Report, bars: str = "", stop: Event | None = None) -> Any:
    """Progress class for the hub's client, which counts bytes silently."""

    class Meter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = str(options.get("desc", "")).startswith(bars)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if stop is not None and stop.is_set():
                raise InterruptedError("the download was stopped")
            if self._counts and n:
                report(int(n))
            return None

    return Meter


def _fetch(file: WeightFile, counting: Any) -> None:
    """Raises SetupError where the bytes are not those that the hub names."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    file.lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(file.lock):
        if file.blob.exists():
            return
        with file.part.open("ab") as part:
            if part.tell() > file.n_bytes:
                part.truncate(0)
            if file.n_here < file.n_bytes:
                _append_rest(file, part, counting)
            part.flush()
            os.fsync(part.fileno())
        with file.part.open("rb") as whole:
            is_sound = hashlib.file_digest(whole, "sha256").hexdigest() == file.blob.name
        if not is_sound:
            file.part.unlink()
            raise SetupError(
                f"{file.url} arrived damaged (its SHA-256 differs) and was deleted; pull it again"
            )
        file.part.replace(file.blob)


def _append_rest(file: WeightFile, part: BinaryIO, counting: Any) -> None:
    """Append the rest of a file, whose hash covers its size."""
    try:
        http_get(
            file.url,
            part,
            resume_size=min(part.tell(), file.n_here),
            headers=build_hf_headers(),
            tqdm_class=counting,
        )
    except HfHubHTTPError as error:
        # The file of the hub ends before the bytes that are here, which their hash will show.
        if error.response.status_code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise


def _checked(digest: str, name: str) -> str:
    """SHA-256 of the hub, a file name here. Raises SetupError."""
    if not SHA256.fullmatch(digest):
        raise SetupError(f"the hub names no SHA-256 for {reprlib.repr(name)}; nothing was written")
    return digest


def _folder_name(model: str) -> str:
    return repo_folder_name(repo_id=model, repo_type="model")
