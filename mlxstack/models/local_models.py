"""Models on this machine: the hub's cache and LM Studio's folders."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import DeleteCacheStrategy
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import presets
from mlxstack.core.errors import SetupError
from mlxstack.host.home import Home
from mlxstack.models.bounded_json import read_config_object
from mlxstack.models.hub import cache_folder
from mlxstack.models.model_files import CONFIG, measured, n_trained_in, quantization_in
from mlxstack.models.reference import lm_studio_folders


class LocalModel(Struct, frozen=True):
    """Model on disk."""

    name: str
    path: str
    where: str
    """The hub's cache, LM Studio, or a folder."""
    n_bytes: int
    last_used: float
    """Unix seconds; 0 if unknown."""
    is_complete: bool
    """Whether all files of its weights are there and readable."""
    model_type: str = ""
    quantization: str = ""
    n_trained: int = 0
    fault: str = ""
    """Why a file cannot be read."""


def local_models() -> list[LocalModel]:
    """Every model on this machine, by name."""
    models = [*_cached(), *_of_lm_studio()]
    return sorted(models, key=lambda model: (model.name.lower(), model.where))


def all_models(home: Home) -> list[LocalModel]:
    """Every model on this machine, with folders that were served from `home`."""
    models = local_models()
    paths = {model.path for model in models}
    return [*models, *(model for model in _served(home) if model.path not in paths)]


def delete(model: LocalModel) -> int:
    """Remove a model; the bytes that came back. Raises SetupError."""
    if model.where == "LM Studio":
        shutil.rmtree(model.path)
        return model.n_bytes
    folder = Path(model.path)
    cache = cache_folder().resolve()
    repository = cache / folder.relative_to(cache).parts[0]
    sizes = {file: stats.st_size for file, stats in _stats(_files(repository)).items()}
    none: frozenset[Path] = frozenset()
    # It also sweeps files that no other repository shares, and only logs what it cannot delete.
    DeleteCacheStrategy(
        0, none, none, frozenset({repository.resolve()}), none, cache_dir=cache
    ).execute()
    if repository.is_symlink():
        repository.unlink()
    if repository.exists():
        raise SetupError(f"{repository} cannot be deleted whole; check its permissions")
    return sum(n_bytes for file, n_bytes in sizes.items() if not file.exists())


def quantization_of(folder: str) -> str:
    """Quantization of the model in a folder, as its config.json names it."""
    return quantization_in(_config(Path(folder)))


def _cached() -> Iterator[LocalModel]:
    """Repositories in the hub's cache by their newest snapshots."""
    for folder in cache_folder().resolve().glob("models--*"):
        snapshots = sorted(
            folder.glob("snapshots/[!.]*"), key=lambda snapshot: snapshot.stat().st_mtime
        )
        # A download that has just begun holds nothing.
        if files := _files(folder):
            name = folder.name.removeprefix("models--").replace("--", "/")
            yield _model(name, [folder, *snapshots][-1], "hub", files)


def _files(repository: Path) -> list[Path]:
    return [*repository.glob("blobs/*"), *repository.glob("snapshots/**/*")]


def _of_lm_studio() -> Iterator[LocalModel]:
    for folder in lm_studio_folders():
        for config in sorted(folder.glob(f"*/*/{CONFIG}")):
            name = str(config.parent.relative_to(folder))
            yield _model(name, config.parent, "LM Studio", config.parent.iterdir())


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
            model = _model(name, folder, "folder", folder.iterdir())
            yield replace(model, last_used=file.stat().st_mtime)


def _model(name: str, path: Path, where: str, files: Iterable[Path]) -> LocalModel:
    config = _config(path)
    is_complete, fault = _state(path)
    stats = _stats(files).values()
    return LocalModel(
        name=name,
        path=str(path),
        where=where,
        n_bytes=sum(file.st_size for file in stats),
        last_used=max((file.st_atime for file in stats), default=path.stat().st_mtime),
        is_complete=is_complete,
        model_type=str(config.get("model_type", "")),
        quantization=quantization_in(config),
        n_trained=n_trained_in(config),
        fault=fault,
    )


def _stats(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Stats of files and targets of links, each once."""
    return {file: file.stat() for file in {path.resolve() for path in files if path.is_file()}}


def _state(path: Path) -> tuple[bool, str]:
    """Whether all files are there, and the fault of one."""
    try:
        if broken := next((file for file in path.rglob("*") if not file.exists()), None):
            return False, f"{broken} is a link to no file"
        if not (path / CONFIG).is_file():
            return False, ""
        read_config_object(path / CONFIG)
        return measured(path) is not None, ""
    except Exception as error:  # A damaged file is listed, whatever is wrong with it.
        return False, str(error)


def _config(path: Path) -> dict[str, Any]:
    try:
        return read_config_object(path / CONFIG)
    except SetupError:
        return {}
