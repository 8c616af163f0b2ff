"""Hugging Face hub: configs, sizes, downloads and their errors."""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.formatting import size
from mlxstack.host.installer import install_command
from mlxstack.models import hub_answers
from mlxstack.models.bounded_json import read_object
from mlxstack.models.model_files import CONFIG, INDEX, SHARD, SINGLE, is_whole
from mlxstack.models.weight_download import (
    PART,
    WEIGHTS,
    Report,
    blobs_folder,
    fetch_weights,
    meter,
    missing_weights,
)

PATTERNS = (
    "*.json", "model*.safetensors", "mtp*.safetensors", "*.py", "tokenizer.model", "*.tiktoken",
    "tiktoken.model", "*.txt", "*.jsonl", "*.jinja", "*_Dense/model.safetensors",
)  # fmt: skip
"""Files of a repository that mlx-lm loads, its MTP head, and dense layers of embedders."""

BESIDE_WEIGHTS = tuple(pattern for pattern in PATTERNS if not pattern.endswith(WEIGHTS))
"""Patterns of its small files, without which a snapshot with all weights would not load."""

BESIDE_CONFIG = ("generation_config.json", "chat_template.jinja")
N_NEAR = 3
BYTES_BAR = "Reconstructing"
"""The bar of the hub's client that counts bytes."""

PROXIES = ("all_proxy", "http_proxy", "https_proxy")
NO_PROXY = "no_proxy"
OF_HTTP = ("http://", "https://")

DISK_RESERVE = 2**30
"""Bytes of the disk that a download leaves free."""

# Its warnings are said better by the refusals here.
logging.getLogger("huggingface_hub").setLevel("ERROR")
hub_answers.install()


class Download(Struct, frozen=True):
    """Bytes of a repository's files: all, weights, and missing ones."""

    model: str
    n_bytes: int
    n_weights: int
    n_missing: int


def cache_folder() -> Path:
    """Folder of the downloads of the hub's client."""
    return Path(constants.HF_HUB_CACHE)


def plan(model: str, revision: str | None = None, patterns: Sequence[str] = PATTERNS) -> Download:
    """Ask the hub for a model's files, without download. Raises SetupError."""
    n_begun = 0
    with _refusals(model):
        files = _files(model, revision, patterns)
        if any(blobs_folder(model).glob(f"*{PART}")):
            n_begun = sum(file.n_here for file in missing_weights(model, revision, _missing(files)))
    if not any(file.filename.endswith(WEIGHTS) for file in files):
        raise _without_weights(model)
    return Download(
        model=model,
        n_bytes=sum(file.file_size or 0 for file in files),
        n_weights=sum(f.file_size or 0 for f in files if f.filename.endswith(WEIGHTS)),
        n_missing=sum(file.file_size or 0 for file in files if file.will_download) - n_begun,
    )


def check_disk(download: Download) -> None:
    """Raise SetupError where the cache's disk is too small."""
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if download.n_missing + DISK_RESERVE > free:
        raise SetupError(
            f"{download.model} needs {size(download.n_missing)} more in {folder}, and that disk "
            f"has {size(free)} free; make room (`mlx-stack models`, `mlx-stack rm`), or set "
            "HF_HOME to another disk"
        )


def download(
    model: str, revision: str | None, report: Report, patterns: Sequence[str] = PATTERNS
) -> Path:
    """Download a model; `report` gets the bytes of each chunk.

    It goes on where an earlier one ended, inside a weight file too.
    """
    began = time.time()
    with _refusals(model):
        files = _files(model, revision, patterns)
        bring = partial(
            snapshot_download,
            model,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=[] if any(file.filename == SINGLE for file in files) else [SINGLE],
            tqdm_class=meter(report, BYTES_BAR),
        )
        if names := _missing(files):
            # An interrupted download is listed by its small files.
            bring(ignore_patterns=[f"*{WEIGHTS}"])
            fetch_weights(missing_weights(model, revision, names), report)
        path = bring()
    _delete_abandoned(model, began)
    return Path(path)


def weight_files_with(model: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """Weight files that hold a wanted tensor. Raises SetupError."""
    with _refusals(model):
        try:
            index = Path(hf_hub_download(model, INDEX))
        except errors.RemoteEntryNotFoundError:
            return [SINGLE]
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise SetupError(f"{index} names no weights")
    return sorted({str(file) for name, file in files.items() if is_wanted(name)})


def is_cached(model: str, names: Sequence[str]) -> bool:
    """Whether these files of a repository are in the cache."""
    return all(isinstance(try_to_load_from_cache(model, name), str) for name in names)


def _files(model: str, revision: str | None, patterns: Sequence[str]) -> Any:
    """Files of a download: of two copies of the weights the shards."""
    files = snapshot_download(
        model,
        revision=revision,
        allow_patterns=list(patterns),
        dry_run=True,
        tqdm_class=meter(lambda _: None),
    )
    has_shards = any(SHARD.fullmatch(file.filename) for file in files)
    return [file for file in files if not (has_shards and file.filename == SINGLE)]


def _missing(files: Any) -> list[str]:
    """Names of the weight files that are not in the cache."""
    return [
        file.filename for file in files if file.will_download and file.filename.endswith(WEIGHTS)
    ]


def _delete_abandoned(model: str, before: float) -> None:
    """Delete partial files that killed downloads left."""
    for part in blobs_folder(model).glob("*.incomplete"):
        with suppress(FileNotFoundError):
            if part.stat().st_mtime < before:
                part.unlink()


def fetch_config(model: str, revision: str | None = None) -> Path:
    """Download the small planning files; returns the config. Raises SetupError."""
    with _refusals(model):
        if not isinstance(try_to_load_from_cache(model, CONFIG, revision=revision), str):
            # A download retries for half a minute without network; this question does not.
            HfApi().model_info(model, revision=revision)
        config = hf_hub_download(model, CONFIG, revision=revision)
        for name in BESIDE_CONFIG:
            with suppress(errors.EntryNotFoundError):
                hf_hub_download(model, name, revision=revision)
    return Path(config)


@contextmanager
def _refusals(model: str) -> Iterator[None]:
    """Failures of the hub's client as SetupError, with cause and remedy."""
    try:
        yield
    except SetupError:
        raise
    except Exception as error:
        raise _refusal(model, error) from error


def _refusal(model: str, error: BaseException) -> SetupError:
    """Error message for a hub client's failure, with cause and remedy."""
    if isinstance(error, errors.DryRunError) and error.__cause__ is not None:
        error = error.__cause__
    match error:
        case errors.GatedRepoError():
            text = f"{model} is gated: accept its license at {_page(model)}, then `hf auth login`"
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            text = (
                f"the hub has no model {model}{_near(model)}; a private one needs `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            text = f"{model} has no such revision; {_page(model)} lists them"
        case errors.HfHubHTTPError() if error.response.status_code in {401, 403}:
            text = f"the hub refuses {model} to this account; `hf auth login`, or another HF_TOKEN"
        case errors.HfHubHTTPError() if error.response.status_code >= 500:
            status = error.response.status_code
            text = f"{constants.ENDPOINT} answers {status} for {model}; try again later"
        case OSError() if error.errno == errno.ENOSPC:
            text = f"the disk of {cache_folder()} is full; `mlx-stack rm` makes room"
        case ImportError() | ValueError() if proxies := _unusable_proxies(error):
            text = (
                f"{model} cannot be downloaded through {' and '.join(proxies)}: a SOCKS proxy "
                f"needs the package socksio, which `{install_command('socks')}` installs in the "
                f"clone; or `unset {' '.join(proxies)}`, or name an HTTP proxy there "
                "(http://host:port)"
            )
        case _ if type(error).__name__ == "InvalidURL" and (named := _proxy_variables()):
            text = (
                f"{model} cannot be downloaded: an address in {', '.join(named)} cannot be read "
                f"({error}); correct it, or `unset {' '.join(named)}`"
            )
        case _ if _is_offline(error):
            return _offline(model)
        case errors.EntryNotFoundError():
            return _without_weights(model)
        case _:
            text = f"{model}: {' '.join(str(error).split())}"
    return SetupError(text)


def _unusable_proxies(error: BaseException) -> list[str]:
    """Variables with the proxies for which httpx makes no client."""
    is_proxy = "socksio" in str(error) or "proxy" in str(error).lower()
    named = (name for name in os.environ if is_proxy and name.lower() in PROXIES)
    return sorted(name for name in named if not os.environ[name].startswith(OF_HTTP))


def _proxy_variables() -> list[str]:
    """Variables from which httpx takes addresses."""
    return sorted(name for name in os.environ if name.lower() in (*PROXIES, NO_PROXY))


def _is_offline(error: BaseException) -> bool:
    # The hub's client wraps a failed connection in what it missed in the cache.
    kinds = (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
    names = {kind.__name__ for kind in type(error).__mro__}
    return constants.is_offline_mode() or isinstance(error, kinds) or "TransportError" in names


def _offline(model: str) -> SetupError:
    # The newest commit is here in part, or unknown, as in a copied cache.
    snapshots = blobs_folder(model).with_name("snapshots").glob("*")
    if earlier := sorted(
        filter(is_whole, snapshots), key=lambda snapshot: snapshot.stat().st_mtime
    ):
        return SetupError(
            f"the newest {model} is not on this machine, and {constants.ENDPOINT} cannot be asked; "
            f"an earlier one is: `mlx-stack up {earlier[-1]}`"
        )
    if constants.is_offline_mode():
        return SetupError(
            f"{model} is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub; unset it"
        )
    if any(blobs_folder(model).glob(f"*{PART}")):
        return SetupError(
            f"{model} is here in part, and {constants.ENDPOINT} cannot be reached; `mlx-stack pull "
            f"{model}` goes on from there"
        )
    return SetupError(
        f"{model} is not on this machine, and {constants.ENDPOINT} cannot be reached; check the "
        "network, the proxy and HF_ENDPOINT"
    )


def _without_weights(model: str) -> SetupError:
    names = _listed_files(model)
    if any(name.lower().endswith(".gguf") for name in names):
        return SetupError(
            f"{model} holds GGUF files, which llama.cpp reads; get the MLX version of this "
            f"model{_near(model.removesuffix('-GGUF'))}"
        )
    lacks = "config.json"
    if "config.json" in names:
        lacks = "safetensors weights"
    return SetupError(f"{model} holds no {lacks}, so mlx-lm cannot load it")


def _listed_files(model: str) -> Sequence[str]:
    try:
        return HfApi().list_repo_files(model)
    except Exception:  # The refusal that is being made says enough.
        return ()


def _near(model: str) -> str:
    """Suggest hub models with similar names: `; did you mean ...?`"""
    name = model.rpartition("/")[2]
    try:
        ids = [hit.id for hit in HfApi().list_models(search=name, limit=N_NEAR)]
        if not ids:
            stem = name.replace("_", "-").rsplit("-", 2)[0]
            ids = [hit.id for hit in HfApi().list_models(search=stem, limit=N_NEAR)]
    except Exception:  # As above.
        return ""
    names = [hub_id for hub_id in ids if hub_id != model]
    if names:
        return f"; did you mean {', '.join(names)}?"
    return ""


def _page(model: str) -> str:
    return f"{constants.ENDPOINT}/{model}"
