"""Writes the fixtures of this folder with mlx-vlm: pixels and features of tiny random towers.

`make oracle` runs it in an environment of its own. A fixture holds the input of a tower and its
output; picture and weights are those of this file and of `tests/vision_models.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from PIL import Image

from tests import vision_models

FOLDER = Path(__file__).parent
QWEN: dict[str, Any] = {
    **vision_models.QWEN_VISION,
    "model_type": "qwen3_vl",
    "patch_size": 4,
    "deepstack_visual_indexes": [0, 2],
}
PIXTRAL: dict[str, Any] = {**vision_models.MISTRAL3["vision_config"], "patch_size": 4}
PROMPT = [5, 6, 7, "first", 5, 6, 7, "second", 5, 6]
"""Tokens, and the two images of the fixture of positions; 7 begins an image."""


def picture(width: int, height: int) -> Image.Image:
    """Waves of three colors."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 5), np.cos(y / 7), np.sin((x + y) / 11)]
    return Image.fromarray(np.uint8(127.5 + 127.5 * np.stack(waves, -1)))


def qwen() -> dict[str, mx.array]:
    """Qwen3-VL: a tower with two deepstack layers, positions of a prompt with two images."""
    from mlx_vlm.models.qwen3_vl.config import VisionConfig
    from mlx_vlm.models.qwen3_vl.language import LanguageModel
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
    from mlx_vlm.models.qwen3_vl.vision import VisionModel

    processor = Qwen3VLImageProcessor(patch_size=4, min_pixels=1024, max_pixels=2048)
    found = processor([picture(90, 50)])
    pixels, grid = mx.array(found["pixel_values"]), mx.array(found["image_grid_thw"])
    tower = VisionModel(VisionConfig.from_dict(QWEN))
    tower.update(tree_unflatten(list(vision_models.qwen_tower(QWEN).items())))
    embeddings, deepstack = tower(pixels, grid)

    grids = mx.concatenate([grid, mx.array([[1, 10, 6]])])
    n_features = dict(zip(("first", "second"), (grids.prod(1) // 4).tolist(), strict=True))
    ids = [i for part in PROMPT for i in ([part] if part in range(8) else [8] * n_features[part])]

    class Config:
        vision_config = VisionConfig.from_dict(QWEN)
        image_token_id, video_token_id, vision_start_token_id = 8, 9, 7

    class Model:
        config = Config

    positions, _ = LanguageModel.get_rope_index(Model, mx.array([ids]), grids)
    return {
        "pixels": pixels,
        "features": grids[:, 1:] // 2,
        "embeddings": embeddings,
        "deepstack": mx.stack(deepstack),
        "positions": positions[:, 0],
    }


def pixtral() -> dict[str, mx.array]:
    """Mistral 3: patches of 4 pixels, merged by 2 x 2."""
    from mlx_vlm.models.mistral3.config import ModelConfig, TextConfig, VisionConfig
    from mlx_vlm.models.mistral3.mistral3 import Mistral3MultiModalProjector
    from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor
    from mlx_vlm.models.pixtral.vision import VisionModel

    found = PixtralImageProcessor(size={"longest_edge": 64})(picture(90, 50), patch_size=8)
    pixels, sizes = mx.array(found["pixel_values"]), found["image_sizes"]
    text = TextConfig.from_dict(vision_models.MISTRAL3["text_config"])
    config = ModelConfig(text, VisionConfig.from_dict(PIXTRAL), "mistral3")
    parts = {
        "vision_tower": VisionModel(config.vision_config),
        "multi_modal_projector": Mistral3MultiModalProjector(config),
    }
    for name, array in vision_models.pixtral_tower(PIXTRAL).items():
        part, rest = name.split(".", 1)
        own = f"vision_model.{rest}" if part == "vision_tower" else rest
        parts[part].update(tree_unflatten([(own, array)]))
    sides = mx.array(sizes)
    hidden, _ = parts["vision_tower"](pixels.transpose(0, 2, 3, 1), image_sizes=sides)
    features = parts["multi_modal_projector"](hidden, sides)
    return {"pixels": pixels[0], "features": sides // 8, "embeddings": features}


FAMILIES: dict[str, Callable[[], dict[str, mx.array]]] = {"qwen": qwen, "pixtral": pixtral}

if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for name, family in FAMILIES.items():
        mx.save_safetensors(str(FOLDER / f"{name}.safetensors"), family())
