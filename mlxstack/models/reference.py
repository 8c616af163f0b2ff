"""Resolves a model reference: hub id, folder, or cache folder."""

import re
from pathlib import Path

from msgspec import Struct

from mlxstack.config import presets
from mlxstack.config.presets import BUILTIN_MODEL, expanded, is_folder
from mlxstack.core.errors import SetupError
from mlxstack.host.home import Home
from mlxstack.models.folder_check import check_startable
from mlxstack.models.model_files import CONFIG, gguf_refusal

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
HUB_HOST = r"(?:www\.)?(?:huggingface\.co|hf\.co|hf-mirror\.com)/"
HUB_URL = re.compile(
    rf"(?:hf://|(?:https?://)?{HUB_HOST})?(?!{HUB_HOST})([\w.-]+/[\w.-]+?)(?:\.git)?/?"
    r"(?:/(?:tree|blob|resolve)/main(?:/.*)?)?(?:[?#].*)?",
    re.ASCII,
)
"""Address of a repository as browsers, `git clone` and other tools have it."""
REPOSITORY = re.compile(r"models--(.+?)--(.+)")
UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
MAX_NAME = 64

PUBLISHER = "mlx-community"
OLLAMA_NAME = re.compile(r"([A-Za-z0-9][\w.-]*):([\w.-]+)", re.ASCII)
PARAMETERS = re.compile(r"\d+(\.\d+)?b(-a\d+b)?|\d+m", re.ASCII)
QUANTIZED_NAME = re.compile(r"[A-Za-z0-9][\w.-]*-(\d+bit|bf16|fp16|mxfp4)[\w.-]*", re.I | re.ASCII)
HUB_NAMES = {
    "gemma3": "gemma-3-{}-it-4bit",
    "llama3.1": "Meta-Llama-3.1-{}-Instruct-4bit",
    "llama3.2": "Llama-3.2-{}-Instruct-4bit",
    "qwen2.5": "Qwen2.5-{}-Instruct-4bit",
    "qwen2.5-coder": "Qwen2.5-Coder-{}-Instruct-4bit",
    "qwen3": "Qwen3-{}-4bit",
    "qwen3.5": "Qwen3.5-{}-4bit",
}
"""Repository of a family by its size, such as 4B, for families of Ollama's library."""

LM_STUDIO_FOLDERS = ("~/.lmstudio/models", "~/.cache/lm-studio/models")


class Reference(Struct, frozen=True):
    """Model by hub id or folder; `name` is that of its service."""

    id: str
    name: str


def hub_id_of(text: str) -> str:
    """Hub id in an address; other texts unchanged."""
    match = HUB_URL.fullmatch(text.strip())
    if match and HUB_ID.fullmatch(match[1]) and not is_folder(text):
        return match[1]
    return text


def resolve(text: str, home: Home) -> Reference:
    """Find the model that is meant. Raises SetupError with near names.

    The name of a preset is none: `presets.is_known` tells.
    """
    folder = _folder(text)
    if folder is not None:
        return _of_folder(folder)
    text = hub_id_of(text)
    if text == BUILTIN_MODEL or not HUB_ID.fullmatch(text):
        _refuse_file(expanded(text))
        if is_folder(text):
            raise SetupError(
                f"there is no folder {expanded(text)}; give a preset, a hub id or a model folder"
            )
        _refuse_foreign(text, home)
        presets.find(text, home)
    local = lm_studio_model(text)
    return Reference(str(local or text), service_name(text.rpartition("/")[2]))


def _refuse_file(path: Path) -> None:
    """Raise SetupError for a file of weights in place of its folder."""
    if not path.is_file():
        return
    if path.suffix.lower() == ".gguf":
        raise gguf_refusal(path)
    raise SetupError(f"{path} is a file; give the folder of the model, {path.parent}")


def lm_studio_folders() -> list[Path]:
    """The folders in which LM Studio keeps models here."""
    folders = [Path(name).expanduser() for name in LM_STUDIO_FOLDERS]
    return [folder for folder in folders if folder.is_dir()]


def lm_studio_model(model: str) -> Path | None:
    """Folder of a model that LM Studio downloaded; None without one."""
    folders = (folder / model for folder in lm_studio_folders())
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def _refuse_foreign(text: str, home: Home) -> None:
    """Raise SetupError, with a hub id, for Ollama's spelling or a bare repository name."""
    if match := OLLAMA_NAME.fullmatch(text):
        family = match[1].lower()
        tag = match[2].lower()
        if (preset := f"{family}-{tag}") in presets.listed(home):
            near = f"use the preset `{preset}`"
        elif (pattern := HUB_NAMES.get(family)) and PARAMETERS.fullmatch(tag):
            near = f"try `{PUBLISHER}/{pattern.format(tag if family == 'gemma3' else tag.upper())}`"
        else:
            near = f"look for one at https://huggingface.co/{PUBLISHER}"
        raise SetupError(f"`{text}` is Ollama's name for a model, not a hub id; {near}")
    if QUANTIZED_NAME.fullmatch(text):
        raise SetupError(f"`{text}` is a hub id without its owner; try `{PUBLISHER}/{text}`")


def _folder(text: str) -> Path | None:
    path = expanded(text)
    if path.name == CONFIG and path.is_file():
        path = path.parent
    if path.is_dir():
        return path.absolute()
    return None


def _of_folder(folder: Path) -> Reference:
    """Model folder, hub cache repository, or a snapshot in one."""
    above = (
        parent for parent in (folder, *folder.parents[:2]) if REPOSITORY.fullmatch(parent.name)
    )
    repository = next((parent for parent in above if (parent / "snapshots").is_dir()), None)
    if repository is None:
        check_startable(folder)
        return Reference(str(folder), service_name(folder.name))
    snapshot = folder
    if folder.parent.name != "snapshots":
        snapshot = _newest(repository)
    check_startable(snapshot)
    match = REPOSITORY.fullmatch(repository.name)
    assert match is not None
    from mlxstack.models.hub import cache_folder  # noqa: PLC0415 - slow, and rarely needed

    is_own = repository.parent.resolve() == cache_folder().resolve()
    is_newest = is_own and snapshot.resolve() == _newest(repository).resolve()
    model = f"{match[1]}/{match[2]}" if is_newest else str(snapshot)
    return Reference(model, service_name(match[2]))


def _newest(repository: Path) -> Path:
    """The snapshot that `main` names, else the one that came last."""
    reference = repository / "refs" / "main"
    if reference.is_file():
        named = repository / "snapshots" / reference.read_text().strip()
        if named.is_dir():
            return named
    snapshots = sorted(
        (repository / "snapshots").iterdir(), key=lambda snapshot: snapshot.stat().st_mtime
    )
    if not snapshots:
        raise SetupError(f"{repository} holds no downloaded files; `mlx-stack pull` gets them")
    return snapshots[-1]


def service_name(text: str) -> str:
    """A service's name from the name of a model."""
    return UNFIT.sub("-", text).strip("-._")[:MAX_NAME] or "model"
