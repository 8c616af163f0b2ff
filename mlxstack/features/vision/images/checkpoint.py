"""Vision part of a checkpoint, and checks of its settings."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import SetupError

TOWER = "vision.safetensors"
"""File of a tower beside a text model that mlx-lm loads without it, as the demo's."""


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
        settings = self.config.get("vision_config")
        return settings if isinstance(settings, dict) else {}


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
