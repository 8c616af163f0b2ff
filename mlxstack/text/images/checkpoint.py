"""Tensors and settings of a vision tower in a model folder."""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import SetupError

NAME = re.compile(
    r"(?:model\.)?(?:language_model\.)?"
    r"(visual|vision_tower(?:\.vision_model)?|multi_modal_projector|embed_vision)\.(.+)"
)
"""Names of tensors: converters differ in what stands before the part."""
PROJECTORS = ("multi_modal_projector", "embed_vision")
TOWER = "vision.safetensors"
"""File of a tower beside a text model that mlx-lm loads without it, as the demo's."""
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors refuses longer ones."""
READ_PER_TENSOR = 1024
"""Bytes of each tensor in the fingerprint."""


class VisionFiles(Struct, frozen=True):
    """Vision part of a checkpoint.

    `tensors` maps the name of each tensor, which begins with `vision_tower.` or with the name of
    another part, to its file and to its name there. `preprocessor` is the JSON of the image
    processor's settings, or {}.
    """

    config: dict[str, Any]
    preprocessor: bytes
    tensors: dict[str, tuple[Path, str]]
    fingerprint: str

    @property
    def vision_config(self) -> dict[str, Any]:
        """`vision_config` of config.json."""
        found = self.config.get("vision_config")
        return found if isinstance(found, dict) else {}

    def has(self, prefix: str) -> bool:
        """Whether a tensor's name begins so."""
        return any(name.startswith(prefix) for name in self.tensors)


def vision_files(folder: Path) -> VisionFiles | None:
    """Vision part of the checkpoint in `folder`, if any.

    Decided by the tensors, since conversions keep `vision_config` without them. Raises SetupError
    for files that cannot be read.
    """
    tensors: dict[str, tuple[Path, str]] = {}
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("model*.safetensors"), *folder.glob(TOWER)]):
        for name, own in _scanned(file, digest):
            tensors[name] = file, own
    if not any(name.startswith("vision_tower.") for name in tensors):
        return None
    config = _decoded(_read(folder / "config.json"), folder / "config.json")
    return VisionFiles(config, _preprocessor(folder), tensors, digest.hexdigest()[:32])


def check_patch(patch: object, merge: object) -> None:
    """Check sides in pixels and patches. Raises SetupError."""
    if not (isinstance(patch, int) and isinstance(merge, int) and 1 <= patch * merge <= 256):
        raise SetupError(
            f"vision_config: a patch of {patch} pixels merged by {merge} is not served"
        )


def convert(files: VisionFiles, kind: type[Any]) -> Any:
    """The settings of the image processor as a struct. Raises SetupError."""
    try:
        return msgspec.json.decode(files.preprocessor, type=kind)
    except msgspec.MsgspecError as why:
        raise SetupError(f"the settings of the image processor are not usable: {why}") from why


def _scanned(file: Path, digest: Any) -> list[tuple[str, str]]:
    """Vision tensors of a file, our names and its own; digested."""
    found = []
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = _decoded(stream.read(min(length, LONGEST_HEADER)), file)
            for own, tensor in sorted(header.items()):
                match = NAME.fullmatch(own)
                if match is None:
                    continue
                begin, end = tensor["data_offsets"]
                stream.seek(8 + length + begin)
                digest.update(f"{own} {tensor['dtype']} {tensor['shape']}\0".encode())
                digest.update(stream.read(min(end - begin, READ_PER_TENSOR)))
                part = match[1] if match[1] in PROJECTORS else "vision_tower"
                found.append((f"{part}.{match[2]}", own))
    except (OSError, KeyError, TypeError, ValueError) as why:
        raise SetupError(f"{file} cannot be read: {why}") from why
    return found


def _preprocessor(folder: Path) -> bytes:
    """Settings of the image processor; newer checkpoints keep them in processor_config.json."""
    if (file := folder / "preprocessor_config.json").is_file():
        return _read(file)
    if (file := folder / "processor_config.json").is_file():
        return msgspec.json.encode(_decoded(_read(file), file).get("image_processor") or {})
    return b"{}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as why:
        raise SetupError(f"{file} cannot be read: {why.strerror}") from why


def _decoded(data: bytes, file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as why:
        raise SetupError(f"{file} is not what it should be: {why}") from why
