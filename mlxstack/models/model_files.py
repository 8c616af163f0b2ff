"""Files of a model folder: config, weights, vision tensors. A fault is a SetupError."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.config.presets import BUILTIN_MODEL, expanded, is_folder
from mlxstack.core.errors import SetupError
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.core.preset import ModelSpec, VisionSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.features.vision.images.checkpoint import TOWER, VisionFiles
from mlxstack.features.vision.images.families import (
    FAMILIES,
    PLAIN_BITS,
    family_of,
    has_pillow,
    why_not_served,
)
from mlxstack.models.bounded_json import (
    CONTEXT_KEYS,
    MAX_FILE_BYTES,
    is_lfs_pointer,
    parse_object,
    pointer_refusal,
    read_bytes,
    read_config_object,
    read_object,
    refuse_special,
)
from mlxstack.models.mtp_layouts import (
    HeadTensors,
    has_stored_table,
    head_tensors,
    is_of_table,
    table_manifest,
)
from mlxstack.policy.memory.capacity import Weights

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
"""Index of the weight files, and the file of a repository without one."""
FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
SHARD = re.compile(r"(.+-)\d+-of-(\d{1,5})\.safetensors")
BESIDE = ("vision_model", "vision_embedder", "audio_tower", "embed_audio")
"""Beginnings of tensors of other towers, which are not loaded."""
VISION_NAME = re.compile(
    r"(?:model\.)?(?:language_model\.)?"
    r"(visual|vision_tower(?:\.vision_model)?|multi_modal_projector|embed_vision)\.(.+)"
)
"""Names of vision tensors: converters differ in what stands before the part."""
PROJECTORS = ("multi_modal_projector", "embed_vision")
READ_PER_TENSOR = 1024
"""Bytes of each tensor in the fingerprint."""


class ModelFiles(Struct, frozen=True):
    """Config of a model, and the sizes of its weights."""

    config: dict[str, Any]
    source: Path
    """File of the config."""
    is_excerpt: bool = False
    """Whether the config holds only those fields that decide sizes."""
    weights: Weights | None = None
    """None where the files are not here."""
    hub_bytes: int = 0
    """Size of the files on the hub; 0 where it was not asked."""
    head: Weights = Weights()
    """Weights of an MTP head in any file."""


def find_model(
    spec: ModelSpec, excerpts: Path, ask_hub: Callable[[ModelSpec], ModelFiles] | None = None
) -> ModelFiles:
    """Find a model: folder, hub snapshot, or config excerpt.

    `excerpts` is a folder of JSON files that name their model; a model in none of these places
    is looked for on the hub by `ask_hub`, if given. Raises SetupError.
    """
    folder = _folder(spec)
    if folder is not None and (folder / CONFIG).is_file():
        files = read_config(folder)
        if files.weights is not None or is_folder(spec.id) or ask_hub is None:
            return files
    for file in sorted(excerpts.glob("*.json")):
        config = read_config_object(file)
        if config.get("excerpt_of") == spec.id:
            return ModelFiles(config, file, is_excerpt=True)
    if ask_hub is None:
        raise SetupError(
            f"nothing is known of {spec.id} before it is downloaded: it is not in the hub's "
            f"cache, and no file in {excerpts} describes it; `mlx-stack pull {spec.id}` gets it"
        )
    return ask_hub(spec)


def whole_snapshot(model: str, revision: str | None = None) -> Path | None:
    """Folder of a complete download; None where files are missing."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and rarely needed
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    if has_all_files(folder):
        return folder
    return None


def has_all_files(folder: Path) -> bool:
    """Whether config.json and all weights are there. Raises SetupError for damaged ones."""
    return (folder / CONFIG).is_file() and measured(folder) is not None


def is_whole(folder: Path) -> bool:
    """Whether config.json and all weights are there and readable."""
    try:
        return has_all_files(folder)
    except SetupError:
        return False


def gguf_refusal(path: Path) -> SetupError:
    """Refusal of a GGUF file or folder, with the remedy."""
    state = "holds GGUF files"
    if path.is_file():
        state = "is a GGUF file"
    return SetupError(
        f"{path} {state}, which llama.cpp reads; get the MLX version of this model, "
        "such as one of mlx-community on the hub"
    )


def refuse_gguf(folder: Path) -> None:
    """Raise SetupError for a GGUF folder, or one without config."""
    if (folder / CONFIG).is_file():
        return
    if any(folder.glob("*.gguf")):
        raise gguf_refusal(folder)
    raise SetupError(f"{folder} holds no config.json, so it is not a model folder")


def read_config(path: Path) -> ModelFiles:
    """A config.json by its path, or in a model folder. Raises SetupError."""
    if path.is_dir():
        refuse_gguf(path)
    file = path / CONFIG if path.is_dir() else path
    config = read_config_object(file)
    head = head_tensors(config)
    of_head = Weights() if head is None else _head_weights(file.parent, head)
    weights = measured(file.parent, head, has_table=not has_stored_table(config))
    return ModelFiles(config, file, weights=weights, head=of_head)


def _head_weights(folder: Path, head: HeadTensors) -> Weights:
    """Weights of an MTP head in any file.

    Raises SetupError for a damaged file of the model; others count for nothing.
    """
    weights = _sum(weight_files(folder, "model"), head.is_of_head)
    for file in set(weight_files(folder)).difference(weight_files(folder, "model")):
        with suppress(SetupError):
            weights = weights.plus(_sum([file], head.is_of_head))
    return weights


def weight_files(folder: Path, beginning: str = "") -> list[Path]:
    """Weight files whose names begin so, without macOS's `._NAME`."""
    return sorted(folder.glob(f"{beginning or '[!.]'}*.safetensors"))


def identifying_files(folder: Path) -> list[Path]:
    """Weight files on which the KV of a loaded model depends.

    They are its own, an MTP head, a vision tower, and n-gram tables on disk. Raises SetupError.
    """
    files = {*weight_files(folder, "model"), *weight_files(folder, "mtp"), *folder.glob(TOWER)}
    return sorted(files.union(_table_files(folder)))


def _table_files(folder: Path) -> Iterator[Path]:
    """Manifest of n-gram tables on disk, and the files that it names.

    They are those of mlx_vlm/models/qwen4_exp/ple_storage.py.
    """
    name = table_manifest(read_object(folder / CONFIG))
    if not name:
        return
    manifest = folder / name
    tables = read_object(manifest)
    yield manifest
    if "data_file" in tables:
        yield manifest.parent / tables["data_file"]
    for shard in tables.get("shards", ()):
        tensors = (part for part in shard.values() if isinstance(part, dict))
        yield from (manifest.parent / tables["source_root"] / part["file"] for part in tensors)


def measured(
    folder: Path, head: HeadTensors | None = None, *, has_table: bool = True
) -> Weights | None:
    """Weights without vision tower and MTP head, from file headers.

    Without `has_table` n-gram tables stay on disk. None when there are none, or some of the files
    are missing. Raises SetupError.
    """

    def is_wanted(name: str) -> bool:
        if head is not None and head.is_of_head(name):
            return False
        return _is_loaded(name) and (has_table or not is_of_table(name))

    refuse_two_models(folder)
    files = weight_files(folder, "model")
    if not files or missing_weights(folder):
        return None
    return _sum(files, is_wanted)


def vision_files(folder: Path) -> VisionFiles | None:
    """Vision part of the checkpoint in `folder`, if any.

    Decided by the tensors, since conversions keep `vision_config` without them. Raises SetupError
    for files that cannot be read.
    """
    tensors: dict[str, tuple[Path, str]] = {}
    digest = hashlib.sha256()
    for file in (*weight_files(folder, "model"), *folder.glob(TOWER)):
        for name, own in _vision_tensors(file, digest):
            tensors[name] = file, own
    if not any(name.startswith("vision_tower.") for name in tensors):
        return None
    config = read_object(folder / CONFIG)
    return VisionFiles(config, _preprocessor(folder), tensors, digest.hexdigest()[:32])


def _vision_tensors(file: Path, digest: Any) -> list[tuple[str, str]]:
    """Vision tensors of a file, our names and its own; digested."""
    tensors = []
    with _reading(file):
        header, start = _header(file)
        with file.open("rb") as stream:
            for own, tensor in sorted(header.items()):
                match = VISION_NAME.fullmatch(own)
                if match is None:
                    continue
                begin, end = tensor["data_offsets"]
                stream.seek(start + begin)
                digest.update(f"{own} {tensor['dtype']} {tensor['shape']}\0".encode())
                digest.update(stream.read(min(end - begin, READ_PER_TENSOR)))
                part = "vision_tower"
                if match[1] in PROJECTORS:
                    part = match[1]
                tensors.append((f"{part}.{match[2]}", own))
    return tensors


def _preprocessor(folder: Path) -> bytes:
    """Settings of the image processor; newer checkpoints keep them in processor_config.json."""
    if (file := folder / "preprocessor_config.json").is_file():
        return read_bytes(file, MAX_FILE_BYTES)
    if (file := folder / "processor_config.json").is_file():
        return msgspec.json.encode(read_object(file).get("image_processor") or {})
    return b"{}"


def processor_of(folder: Path, max_pixels: int = VisionSpec().max_pixels) -> ImageProcessor | None:
    """Image processor of the model in `folder`, if it takes images.

    Decided by the files and by the installed packages. Raises SetupError for broken files.
    """
    files = vision_files(folder)
    if files is None or not has_pillow() or (family := family_of(files)) is None:
        return None
    return family.processor(files, max_pixels)


def why_text_only(folder: Path, kv_bits: int = PLAIN_BITS) -> str:
    """Reason not to serve images, or "". Raises SetupError."""
    files = vision_files(folder)
    if files is None:
        return "its files hold no vision tower"
    if files.config.get("model_type") in FAMILIES and family_of(files) is None:
        return "its vision tower lacks weights"
    return why_not_served(files.config, kv_bits)


def accepts_images(folder: Path, kv_bits: int = PLAIN_BITS) -> bool:
    """Whether images are served, by files and packages; False for broken files."""
    try:
        return not why_text_only(folder, kv_bits)
    except SetupError:
        return False


def vision_weights(folder: Path) -> Weights:
    """Weights of the tower, if images are served. Raises SetupError."""
    files = vision_files(folder)
    is_served = files is not None and has_pillow() and family_of(files) is not None
    if files is not None and is_served:
        return tower_weights(files)
    return Weights()


def tower_weights(files: VisionFiles) -> Weights:
    """Weights of a vision tower, from file headers. Raises SetupError."""
    of_tower = sorted({file for file, _ in files.tensors.values()})
    return _sum(of_tower, lambda name: VISION_NAME.fullmatch(name) is not None)


def missing_weights(folder: Path) -> list[str]:
    """Missing weight files, by the index or by their numbers.

    An index that names no file of the folder was left by a conversion, and counts for nothing.
    """
    present = {file.name for file in weight_files(folder, "model")}
    return sorted(_named_weights(folder, present) - present)


def _named_weights(folder: Path, present: set[str]) -> set[str]:
    """Files by the index, else by the numbers in file names."""
    named = _names(folder)
    if named & present:
        return named
    matches = (SHARD.fullmatch(name) for name in present)
    rows = {(match[1], match[2]) for match in matches if match}
    return {
        f"{beginning}{number:0{len(total)}}-of-{total}.safetensors"
        for beginning, total in rows
        for number in range(1, int(total) + 1)
    }


def refuse_two_models(folder: Path) -> None:
    """Raise SetupError for files of two models.

    mlx_lm.utils.load_model reads all files, in the order of the directory: of two tensors of one
    name either may be taken.
    """
    files = weight_files(folder, "model")
    present = {file.name for file in files}
    named = _named_weights(folder, present)
    shards = sorted(named & present)
    if SINGLE in present and shards and SINGLE not in shards:
        raise SetupError(
            f"{folder} holds {SINGLE} beside {shards[0]}, and mlx-lm would mix their tensors; keep "
            "one of the two (of a model of the hub `mlx-stack rm` and `pull` keep the shards)"
        )
    if len(files) > 1:
        _refuse_same_tensors(folder, files, named)


def _refuse_same_tensors(folder: Path, files: Sequence[Path], named: set[str]) -> None:
    """Raise SetupError for a tensor in two versions."""
    holders: dict[str, Path] = {}
    # Files of the index come first, so that one too many is named as such.
    for file in sorted(files, key=lambda file: (file.name not in named, file.name)):
        names = _tensors(file)
        for name in names:
            holder = holders.get(name)
            if holder is not None and _beginning(file, name) != _beginning(holder, name):
                remedy = "keep those of one model"
                if file.name not in named and holder.name in named:
                    remedy = f"delete {file.name}, which does not belong to the others"
                raise SetupError(
                    f"{folder} holds the tensor {name} in {holder.name} and, with other numbers, "
                    f"in {file.name}, and mlx-lm would take either; {remedy}"
                )
        holders |= dict.fromkeys(names, file)


def _beginning(file: Path, name: str) -> tuple[Any, Any, bytes]:
    """Type, shape and first bytes of a tensor."""
    with _reading(file):
        header, start = _header(file)
        begin, end = header[name]["data_offsets"]
        with file.open("rb") as stream:
            stream.seek(start + begin)
            beginning = stream.read(min(end - begin, READ_PER_TENSOR))
        return header[name]["dtype"], header[name]["shape"], beginning


def check_weight_file(file: Path) -> None:
    """Raise SetupError for a damaged weight file."""
    _sum([file], lambda _: True)


def _tensors(file: Path) -> list[str]:
    """Tensors of a file by name. Raises SetupError."""
    with _reading(file):
        return [name for name in _header(file)[0] if name != "__metadata__"]


def tensor_names(folder: Path) -> set[str]:
    """Tensors that mlx-lm reads, by name. Raises SetupError."""
    return {name for file in weight_files(folder, "model") for name in _tensors(file)}


def weights_on_disk(spec: ModelSpec) -> int:
    """Bytes of the weight files on this computer; 0 without any."""
    folder = _folder(spec)
    files = weight_files(folder, "model") if folder is not None else ()
    return sum(file.stat().st_size for file in files)


def quantization_in(config: dict[str, Any]) -> str:
    """Quantization that a config.json names."""
    tables = (config.get("quantization"), config.get("quantization_config"))
    table = next((table for table in tables if table and isinstance(table, Mapping)), {})
    if bits := table.get("bits"):
        mode = table.get("mode", "affine")
        if mode == "affine":
            return f"{bits} bit"
        return str(mode)
    is_single = "float32" in (config.get("dtype"), config.get("torch_dtype"))
    return str(table.get("quant_method") or ("32 bit" if is_single else "16 bit"))


def n_trained_in(config: Mapping[str, Any]) -> int:
    """Context in tokens that a config.json names; 0 without one."""
    flat = {**config, **(config.get("text_config") or {})}
    return int(next((flat[key] for key in CONTEXT_KEYS if (flat.get(key) or 0) > 0), 0))


def _folder(spec: ModelSpec) -> Path | None:
    if spec.id == BUILTIN_MODEL:
        return MODEL_DIR
    if is_folder(spec.id):
        return expanded(spec.id)
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow, and rarely needed
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        config = try_to_load_from_cache(spec.id, CONFIG, revision=spec.revision)
    except HFValidationError:
        return None
    if isinstance(config, str):
        return Path(config).parent
    return None


def _names(folder: Path) -> set[str]:
    index = folder / INDEX
    weight_map = None
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in names if isinstance(name, str)}


def _is_loaded(name: str) -> bool:
    """Whether a tensor of this name belongs to the text model."""
    return not (VISION_NAME.fullmatch(name) or name.removeprefix("model.").startswith(BESIDE))


def _sum(files: Sequence[Path], is_wanted: Callable[[str], bool]) -> Weights:
    """Sizes of the wanted tensors. Raises SetupError for damaged files."""
    sums = {1: 0, 2: 0, 4: 0}
    for file in files:
        with _reading(file):
            n_bytes = file.stat().st_size
            header, start = _header(file)
            for name, tensor in header.items():
                if name != "__metadata__" and is_wanted(name):
                    begin, end = tensor["data_offsets"]
                    if start + end > n_bytes:
                        raise SetupError(f"{file} ends early; delete it, and get it again")
                    width = FLOAT_BYTES.get(tensor["dtype"], 1)
                    sums[width] += (end - begin) // width
    return Weights(packed=sums[1], n_half=sums[2], n_single=sums[4])


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise SetupError for a damaged or unreadable weight file."""
    try:
        yield
    except (TypeError, ValueError, LookupError) as error:
        raise SetupError(
            f"the header of {file} is damaged: {error}; delete it, and get it again"
        ) from error
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}") from error


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file, and its end.

    It is 8 bytes of length, then JSON.
    """
    refuse_special(file)
    if is_lfs_pointer(file):
        raise pointer_refusal(file)
    with file.open("rb") as stream:
        beginning = stream.read(8)
        if len(beginning) < 8:
            raise ValueError("the file is empty, or cut short")
        length = int.from_bytes(beginning, "little")
        if length > MAX_FILE_BYTES:
            raise ValueError(f"it has {length >> 20} MiB, at most {MAX_FILE_BYTES >> 20} are taken")
        return parse_object(stream.read(length), file), 8 + length
