"""Families of vision models, and what a checkpoint lacks."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.image import ImageProcessor
from mlxstack.core.model_info import Weights
from mlxstack.core.preset import VisionSpec
from mlxstack.text.images import gemma3, gemma4, pixtral, qwen
from mlxstack.text.images.checkpoint import VisionFiles, vision_files


class VisionFamily(Struct, frozen=True):
    """Maker of processors, and prefixes of needed tensors."""

    name: str
    processor: Callable[[VisionFiles, int], ImageProcessor]
    needed: tuple[str, ...]


QWEN = VisionFamily(
    "qwen",
    qwen.processor,
    needed=("vision_tower.patch_embed.", "vision_tower.blocks.", "vision_tower.merger."),
)
PIXTRAL = VisionFamily(
    "pixtral",
    pixtral.processor,
    needed=(
        "vision_tower.patch_conv.",
        "vision_tower.transformer.",
        "multi_modal_projector.linear_2.",
    ),
)
GEMMA3 = VisionFamily(
    "gemma3",
    gemma3.processor,
    needed=(
        "vision_tower.embeddings.patch_embedding.",
        "vision_tower.encoder.",
        "multi_modal_projector.mm_input_projection_weight",
    ),
)
GEMMA4 = VisionFamily(
    "gemma4",
    gemma4.processor,
    needed=(
        "vision_tower.patch_embedder.",
        "vision_tower.encoder.",
        "embed_vision.embedding_projection.",
    ),
)
FAMILIES = {
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "mistral3": PIXTRAL,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
}
"""By `model_type` of config.json."""


def processor_of(folder: Path, max_pixels: int = VisionSpec().max_pixels) -> ImageProcessor | None:
    """Image processor of the model in `folder`, if it takes images.

    Decided by the files and by the installed packages. Raises SetupError for broken files.
    """
    files = vision_files(folder)
    if files is None or not has_pillow() or (family := family_of(files)) is None:
        return None
    return family.processor(files, max_pixels)


def why_text_only(folder: Path) -> str:
    """Reason not to serve images, or "". Raises SetupError."""
    files = vision_files(folder)
    if files is None:
        return "its files hold no vision tower"
    model_type = str(files.config.get("model_type"))
    if model_type not in FAMILIES:
        return f"the vision tower of {model_type} is not served; {', '.join(FAMILIES)} are"
    if family_of(files) is None:
        return "its vision tower lacks weights"
    return "" if has_pillow() else "Pillow is not installed; it comes with the extra [vision]"


def family_of(files: VisionFiles) -> VisionFamily | None:
    """Family with all that it needs in the files."""
    family = FAMILIES.get(str(files.config.get("model_type")))
    return family if family is not None and all(map(files.has, family.needed)) else None


def accepts_images(folder: Path) -> bool:
    """Whether images are served, by files and packages; False for broken files."""
    try:
        return not why_text_only(folder)
    except SetupError:
        return False


def vision_weights(folder: Path) -> Weights:
    """Weights of the tower, if images are served. Raises SetupError."""
    files = vision_files(folder)
    is_served = files is not None and has_pillow() and family_of(files) is not None
    return files.weights if files is not None and is_served else Weights()


def has_pillow() -> bool:
    """Whether Pillow is installed, without loading it."""
    return find_spec("PIL") is not None
