"""Models on this machine: the hub's cache and LM Studio's folders."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from msgspec import Struct

from mlxstack.config import presets
from mlxstack.core.errors import SetupError
from mlxstack.host.home import Home
from mlxstack.models.hub import cache_folder
from mlxstack.models.model_files import CONFIG, measured, quantization_in, read_config_object
from mlxstack.models.reference import lm_studio_folders


class LocalModel(Struct, frozen=True):
    """Model on disk; `last_used` in Unix seconds, 0 if unknown.

    `where` is the hub's cache or LM Studio. An incomplete one lacks files of its weights, or has a
    `fault`: why a file cannot be read.
    """

    name: str
    path: str
    where: str
    n_bytes: int
    last_used: float
    is_complete: bool
    model_type: str = ""
    quantization: str = ""
    n_trained: int = 0
    fault: str = ""


def local_models() -> list[LocalModel]:
    """Every model on this machine, by name."""
    found = [*_cached(), *_of_lm_studio()]
    return sorted(found, key=lambda one: (one.name.lower(), one.where))


def all_models(home: Home) -> list[LocalModel]:
    """Every model on this machine, with folders that were served from `home`."""
    found = local_models()
    known = {one.path for one in found}
    return [*found, *(one for one in _served(home) if one.path not in known)]


def delete(model: LocalModel) -> int:
    """Remove a model from the disk; the bytes that came back."""
    if model.where == "LM Studio":
        shutil.rmtree(model.path)
        return model.n_bytes
    cache = scan_cache_dir(cache_folder())
    repos = [one for one in cache.repos if one.repo_type == "model" and one.repo_id == model.name]
    revisions = [revision.commit_hash for repo in repos for revision in repo.revisions]
    # A copy under another name has the same revisions.
    strategy = replace(cache, repos=frozenset(repos)).delete_revisions(*revisions)
    if not revisions:
        folder = frozenset({Path(model.path)})
        strategy = replace(strategy, repos=folder, expected_freed_size=model.n_bytes)
    strategy.execute()
    return int(strategy.expected_freed_size)


def quantization_of(folder: str) -> str:
    """Quantization of the model in a folder, as its config.json names it."""
    return quantization_in(_config(Path(folder)))


def _cached() -> Iterator[LocalModel]:
    try:
        cache = scan_cache_dir(cache_folder())
    except CacheNotFound:
        return
    for repo in cache.repos:
        newest = max(repo.revisions, key=lambda one: one.last_modified, default=None)
        if repo.repo_type == "model" and newest is not None:
            yield _model(
                repo.repo_id, newest.snapshot_path, "hub", repo.size_on_disk, repo.last_accessed
            )
    yield from _damaged(cache)


def _damaged(cache: HFCacheInfo) -> Iterator[LocalModel]:
    """Downloads that the hub's client does not list."""
    listed = {repo.repo_path for repo in cache.repos if repo.revisions}
    for folder in set(cache_folder().resolve().glob("models--*")) - listed:
        blobs = [one for one in folder.glob("blobs/*") if one.is_file()]
        # A download that has just begun has no snapshot.
        has_snapshots = (folder / "snapshots").exists()
        if not blobs and not has_snapshots:
            continue
        texts = map(str, cache.warnings)
        reasons = (one for one in texts if f"{folder}/" in one or f"({folder})" in one)
        yield LocalModel(
            name=folder.name.removeprefix("models--").replace("--", "/"),
            path=str(folder),
            where="hub",
            n_bytes=sum(one.stat().st_size for one in blobs),
            last_used=folder.stat().st_mtime,
            is_complete=False,
            fault=next(reasons, "a link leads to no file") if has_snapshots else "",
        )


def _of_lm_studio() -> Iterator[LocalModel]:
    for folder in lm_studio_folders():
        for config in sorted(folder.glob(f"*/*/{CONFIG}")):
            files = [file for file in config.parent.iterdir() if file.is_file()]
            n_bytes = sum(file.stat().st_size for file in files)
            used = max(file.stat().st_atime for file in files)
            name = str(config.parent.relative_to(folder))
            yield _model(name, config.parent, "LM Studio", n_bytes, used)


def _served(home: Home) -> Iterator[LocalModel]:
    """Folders of presets that the user or `up` wrote."""
    for name, file in presets.listed(home).items():
        if file.parent not in (home.presets, home.derived_presets):
            continue
        try:
            folder = Path(presets.load(name, home).preset.model.id)
        except SetupError:
            continue
        if folder.is_absolute() and (folder / CONFIG).is_file():
            n_bytes = sum(one.stat().st_size for one in folder.iterdir() if one.is_file())
            yield _model(name, folder, "folder", n_bytes, file.stat().st_mtime)


def _model(name: str, path: Path, where: str, n_bytes: int, used: float) -> LocalModel:
    config = _config(path)
    is_complete, fault = _state(path)
    text = config.get("text_config") or {}
    flat = {**config, **text}
    return LocalModel(
        name=name,
        path=str(path),
        where=where,
        n_bytes=n_bytes,
        last_used=used,
        is_complete=is_complete,
        model_type=str(config.get("model_type", "")),
        quantization=quantization_in(config),
        n_trained=int(flat.get("max_position_embeddings") or 0),
        fault=fault,
    )


def _state(path: Path) -> tuple[bool, str]:
    """Whether all files are there, and the fault of one."""
    if not (path / CONFIG).is_file():
        return False, ""
    try:
        read_config_object(path / CONFIG)
        return measured(path) is not None, ""
    except Exception as why:  # A damaged file is listed, whatever is wrong with it.
        return False, str(why)


def _config(path: Path) -> dict[str, Any]:
    try:
        return read_config_object(path / CONFIG)
    except SetupError:
        return {}
