"""Families of vision models, and reasons not to serve one."""

from importlib.util import find_spec
from typing import Any, Protocol

from mlxstack.core.interfaces import ImageProcessor
from mlxstack.features.vision.images import gemma3, gemma4, pixtral, qwen
from mlxstack.features.vision.images.checkpoint import VisionFiles

PLAIN_BITS = 16
"""`kv.bits` of KV that is not quantized."""


class VisionFamily(Protocol):
    """Module of a family, with the beginnings of needed tensors."""

    NAME: str
    NEEDED: tuple[str, ...]

    def processor(self, files: VisionFiles, max_pixels: int) -> ImageProcessor:
        """Processor of a checkpoint. Raises SetupError."""

    def n_parameters(self, config: dict[str, Any]) -> int:
        """Parameters of the tower that config.json tells of. Raises KeyError, TypeError."""


FAMILIES: dict[str, VisionFamily] = {
    "qwen3_vl": qwen,
    "qwen3_vl_moe": qwen,
    "qwen3_5": qwen,
    "qwen3_5_moe": qwen,
    "mistral3": pixtral,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "llama": pixtral,
}
"""By `model_type` of config.json; the demo is a Llama with a tower of Pixtral's kind."""


def why_not_served(config: dict[str, Any], kv_bits: int) -> str:
    """Reason not to serve images with a whole tower, or ""."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        return f"the vision tower of {model_type} is not served; {', '.join(FAMILIES)} are"
    if not has_pillow():
        return "Pillow is not installed; it comes with the extra [vision]"
    if kv_bits < PLAIN_BITS and is_bidirectional(config):
        return f"images of {model_type} need KV of full precision; set kv.bits to {PLAIN_BITS}"
    return ""


def is_bidirectional(config: dict[str, Any]) -> bool:
    """Whether the tokens of an image attend to each other, by config.json.

    They are computed in one chunk then, so that KV cannot be quantized from a position within.
    """
    text = config.get("text_config")
    is_said = isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
    return config.get("model_type") == "gemma3" or (
        config.get("model_type") == "gemma4" and is_said
    )


def n_tower_parameters(config: dict[str, Any]) -> int:
    """Parameters of the tower that a config.json tells; 0 without one."""
    family = FAMILIES.get(str(config.get("model_type")))
    vision = config.get("vision_config")
    text = config.get("text_config")
    if family is None or not isinstance(vision, dict) or not isinstance(text, dict):
        return 0
    sizes = _sizes(config) | {"vision_config": _sizes(vision), "text_config": _sizes(text)}
    try:
        return family.n_parameters(sizes)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Numbers and lists of a config: a text times a number is long."""
    return {key: value for key, value in config.items() if isinstance(value, int | list)}


def family_of(files: VisionFiles) -> VisionFamily | None:
    """Family with all that it needs in the files."""
    family = FAMILIES.get(str(files.config.get("model_type")))
    if family is None:
        return None
    is_whole = all(any(name.startswith(start) for name in files.tensors) for start in family.NEEDED)
    if is_whole:
        return family
    return None


def has_pillow() -> bool:
    """Whether Pillow is installed, without loading it."""
    return find_spec("PIL") is not None
