"""Config and weight sizes of a local model, without loading it."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxstack.config.preset_paths import BUILTIN_MODEL, expanded, is_folder
from mlxstack.core.errors import SetupError
from mlxstack.core.model_info import Weights
from mlxstack.core.preset import ModelSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.models.foreign_json import LONGEST, parse_object, read_config_object, read_object
from mlxstack.text.images.checkpoint import FLOAT_BYTES, NAME

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
BESIDE = ("vision_model", "vision_embedder", "audio_tower", "embed_audio")
"""Beginnings of tensors of other towers, which are not loaded."""


class ModelFiles(Struct, frozen=True):
    """Model files: `config` from `source`; `weights` is None if absent.

    An excerpt holds only those fields that decide sizes. `hub_bytes` is the size of the files on
    the hub, 0 where it was not asked.
    """

    config: dict[str, Any]
    source: Path
    is_excerpt: bool = False
    weights: Weights | None = None
    hub_bytes: int = 0


def find_model(spec: ModelSpec, excerpts: Path, asks_hub: bool = False) -> ModelFiles:
    """Find a model: folder, hub snapshot, or config excerpt.

    `excerpts` is a folder of JSON files that name their model; a model in none of these places
    is looked for on the hub where `asks_hub` says so. Raises SetupError.
    """
    folder = _folder(spec)
    if folder is not None and (folder / CONFIG).is_file():
        files = read_config(folder)
        if files.weights is not None or is_folder(spec.id) or not asks_hub:
            return files
    for file in sorted(excerpts.glob("*.json")):
        config = read_config_object(file)
        if config.get("excerpt_of") == spec.id:
            return ModelFiles(config, file, is_excerpt=True)
    if not asks_hub:
        raise SetupError(
            f"nothing is known of {spec.id} before it is downloaded: it is not in the hub's "
            f"cache, and no file in {excerpts} describes it; `mlx-stack pull {spec.id}` gets it"
        )
    from mlxstack.models import hub  # noqa: PLC0415

    source = hub.fetch_config(spec.id, spec.revision)
    n_bytes = hub.plan(spec.id, spec.revision).n_weights
    return ModelFiles(read_config_object(source), source, hub_bytes=n_bytes)


def whole_snapshot(model: str, revision: str | None = None) -> Path | None:
    """Folder of a complete download; None where files are missing."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and rarely needed
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    is_whole = (folder / CONFIG).is_file() and measured(folder) is not None
    return folder if is_whole else None


def refuse_gguf(folder: Path) -> None:
    """Raise SetupError for a GGUF folder, or one without config."""
    if (folder / CONFIG).is_file():
        return
    if any(folder.glob("*.gguf")):
        raise SetupError(
            f"{folder} holds GGUF files, which llama.cpp reads; get the MLX version of this "
            "model, such as one of mlx-community on the hub"
        )
    raise SetupError(f"{folder} holds no config.json, so it is not a model folder")


def read_config(path: Path) -> ModelFiles:
    """A config.json by its path, or in a model folder. Raises SetupError."""
    if path.is_dir():
        refuse_gguf(path)
    file = path / CONFIG if path.is_dir() else path
    return ModelFiles(read_config_object(file), file, weights=measured(file.parent))


def measured(folder: Path) -> Weights | None:
    """Weights of the model without its vision tower, from file headers.

    None when there are none, or some of the files that the index names are missing.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files or not _names(folder) <= {file.name for file in files}:
        return None
    sums = {"packed": 0, "n_half": 0, "n_single": 0}
    for file in files:
        try:
            _add_tensors(sums, _header(file))
        except (TypeError, ValueError, LookupError) as why:
            raise SetupError(f"the header of {file} is damaged: {why}") from why
        except OSError as why:
            raise SetupError(f"{file} cannot be read: {why.strerror}") from why
    return Weights(**sums)


def weights_on_disk(spec: ModelSpec) -> int:
    """Bytes of the weight files on this computer; 0 without any."""
    folder = _folder(spec)
    files = folder.glob("model*.safetensors") if folder is not None else ()
    return sum(file.stat().st_size for file in files)


def quantization_in(config: dict[str, Any]) -> str:
    """Quantization that a config.json names."""
    table = config.get("quantization") or config.get("quantization_config") or {}
    if bits := table.get("bits"):
        mode = table.get("mode", "affine")
        return f"{bits} bit" if mode == "affine" else str(mode)
    return str(table.get("quant_method") or "") or "16 bit"


def _folder(spec: ModelSpec) -> Path | None:
    if spec.id == BUILTIN_MODEL:
        return MODEL_DIR
    if is_folder(spec.id):
        return expanded(spec.id)
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow, and rarely needed
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(spec.id, CONFIG, revision=spec.revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _names(folder: Path) -> set[str]:
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map") if index.is_file() else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in names if isinstance(name, str)}


def _add_tensors(sums: dict[str, int], header: dict[str, Any]) -> None:
    """Add the sizes of the tensors that mlx-lm loads."""
    for name, tensor in header.items():
        is_beside = NAME.fullmatch(name) or name.removeprefix("model.").startswith(BESIDE)
        if name == "__metadata__" or is_beside:
            continue
        begin, end = tensor["data_offsets"]
        width = FLOAT_BYTES.get(tensor["dtype"], 1)
        sums[{1: "packed", 2: "n_half", 4: "n_single"}[width]] += (end - begin) // width


def _header(file: Path) -> dict[str, Any]:
    """Header of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LONGEST:
            raise ValueError(f"it has {length >> 20} MiB, at most {LONGEST >> 20} are taken")
        return parse_object(stream.read(length), file)
