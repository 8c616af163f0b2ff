"""Writes the fixtures of this folder with mlx-vlm: towers and whole models, tiny and random.

`make oracle` runs it in an environment of its own. A fixture holds the input of a tower and its
output; picture and weights are those of this file and of `tests/vision_models.py`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from PIL import Image

from mlxstack.models.model_files import processor_of
from tests import vision_models

FOLDER = Path(__file__).parent
QWEN: dict[str, Any] = {
    **vision_models.QWEN_VISION,
    "model_type": "qwen3_vl",
    "patch_size": 4,
    "deepstack_visual_indexes": [0, 2],
}
PIXTRAL: dict[str, Any] = {**vision_models.MISTRAL3["vision_config"], "patch_size": 4}
PICTURE = 128, 96
"""Width and height of the picture of whole models."""
IMAGES = [
    (width, height, most)
    for width, height in ((1920, 1080), (1080, 1920), (48, 48), (1, 1), (4000, 30), (30, 4000))
    for most in (70, 280, 1120)
]
"""Widths, heights and bounds of features for Gemma 4."""
N_GREEDY = 12
N_LOGITS = 4
SPECIAL = re.compile(r"<[^>]+>|\n\n")
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
    pixels = mx.array(found["pixel_values"])
    grid = mx.array(found["image_grid_thw"])
    tower = VisionModel(VisionConfig.from_dict(QWEN))
    weights = vision_models.qwen_tower(QWEN).items()
    tower.update(tree_unflatten([(k.removeprefix("vision_tower."), a) for k, a in weights]))
    embeddings, deepstack = tower(pixels, grid)

    grids = mx.concatenate([grid, mx.array([[1, 10, 6]])])
    n_features = dict(zip(("first", "second"), (grids.prod(1) // 4).tolist(), strict=True))
    ids = [i for part in PROMPT for i in ([part] if part in range(8) else [8] * n_features[part])]

    class Config:
        vision_config = VisionConfig.from_dict(QWEN)
        image_token_id = 8
        video_token_id = 9
        vision_start_token_id = 7

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
    pixels = mx.array(found["pixel_values"])
    sizes = found["image_sizes"]
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


def gemma4() -> dict[str, mx.array]:
    """Gemma 4: rows and columns of features for widths, heights and bounds of features."""
    from mlx_vlm.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

    sides = [
        [s // 48 for s in get_aspect_ratio_preserving_size(height, width, 16, 9 * most, 3)]
        for width, height, most in IMAGES
    ]
    return {"images": mx.array(IMAGES), "features": mx.array(sides)}


def whole(kind: str) -> dict[str, mx.array]:
    """Greedy tokens after a prompt with an image, and logits of the first ones."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    with TemporaryDirectory() as name:
        folder = vision_models.build(Path(name) / "model", kind)
        config = json.loads((folder / "config.json").read_text())
        weights = mx.load(str(folder / "model.safetensors"))
        tokens, _ = scene(folder)
        parts, _ = get_model_and_args(config)
        sizes = update_module_configs(
            parts.ModelConfig.from_dict(config), parts, config, ["text", "vision"]
        )
        model = parts.Model(sizes)
        assert isinstance(weights, dict)
        tower = "vision_tower." if kind != "mistral3" else "vision_tower.vision_model."
        named = [(k.replace("vision_tower.", tower), a) for k, a in weights.items()]
        model.load_weights(named)
    given = inputs_of(kind)
    if kind == "gemma4":
        # The rule of Transformers, which mlx-vlm follows in windowed layers only.
        model.language_model.model._make_masks = _masks_of_gemma4(config, tokens)
    greedy: list[int] = []
    rows = []
    for _ in range(N_GREEDY):
        ids = mx.array([[*tokens, *greedy]])
        if kind == "gemma3":
            given["mask"] = mx.ones_like(ids)
        inputs = model.get_input_embeddings(ids, **given)
        more = {"position_ids": inputs.position_ids} if kind.startswith("qwen") else {}
        if kind == "gemma3":
            # The rule of Transformers, which mlx-vlm's own call does not follow.
            is_image = ids[0] == config["image_token_index"]
            causal = mx.tri(ids.shape[1], dtype=mx.int32).astype(mx.bool_)
            more["mask"] = causal | (is_image[:, None] & is_image)
        if inputs.per_layer_inputs is not None:
            more["per_layer_inputs"] = inputs.per_layer_inputs
        if inputs.deepstack_visual_embeds is not None:
            more["visual_pos_masks"] = inputs.visual_pos_masks
            more["deepstack_visual_embeds"] = inputs.deepstack_visual_embeds
        out = model.language_model(ids, inputs_embeds=inputs.inputs_embeds, **more)
        rows.append(out.logits[0, -1])
        greedy.append(int(mx.argmax(rows[-1]).item()))
    return {f"{kind}.logits": mx.stack(rows[:N_LOGITS]), f"{kind}.greedy": mx.array(greedy)}


def _masks_of_gemma4(config: dict[str, Any], tokens: list[int]) -> Callable[..., list[mx.array]]:
    """Masks by layer: `create_masks_for_vision_model` of Transformers, for one image."""
    text = config["text_config"]

    def masks(hidden: mx.array, *_: Any) -> list[mx.array]:
        at = mx.arange(hidden.shape[1])
        is_image = (mx.array(tokens) == config["image_token_id"]).astype(mx.int32)
        is_image = mx.pad(is_image, (0, hidden.shape[1] - len(tokens))).astype(mx.bool_)
        behind = at[:, None] - at
        causal = behind >= 0
        windowed = (behind < text["sliding_window"]) & (causal | (is_image[:, None] & is_image))
        return [causal if kind == "full_attention" else windowed for kind in text["layer_types"]]

    return masks


def inputs_of(kind: str) -> dict[str, Any]:
    """Pixels of the picture by the processors of mlx-vlm."""
    if kind == "gemma3":
        # As Gemma3ImageProcessor of Transformers.
        scaled = picture(*PICTURE).resize((112, 112), Image.Resampling.BILINEAR)
        pixels = np.asarray(scaled, np.float32) / 127.5 - 1
        return {"pixel_values": mx.array(pixels.transpose(2, 0, 1))[None]}
    if kind == "mistral3":
        from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor

        processor = PixtralImageProcessor(size={"longest_edge": 1540})
        found = processor(picture(*PICTURE), patch_size=28)
        pixels = mx.array(found["pixel_values"])
        return {"pixel_values": pixels, "image_sizes": mx.array(found["image_sizes"])}
    if kind.startswith("gemma4"):
        from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor

        found, _ = Gemma4ImageProcessor(max_soft_tokens=24)([picture(*PICTURE)])
        return {"pixel_values": mx.array(found["pixel_values"])}
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

    processor = Qwen3VLImageProcessor(patch_size=16, min_pixels=64 * 64, max_pixels=4096**2)
    found = processor([picture(*PICTURE)])
    return {name: mx.array(found[name]) for name in ("pixel_values", "image_grid_thw")}


def scene(folder: Path) -> tuple[list[int], slice]:
    """Tokens with placeholders of a prompt with the picture, and the place of its span."""
    processor = processor_of(folder)
    assert processor is not None
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {one["content"]: one["id"] for one in added}
    parts = processor.expand(processor.size(*PICTURE))
    image = [ids[text or processor.placeholder] for text in parts]
    around = processor.framed.split(processor.placeholder)
    before, after = ([ids[part] for part in SPECIAL.findall(text)] for text in around)
    # Without 0, which is padding.
    text = [7 * i % 1000 + 5 for i in range(50)]
    start = 20 + len(before)
    whole = [*text[:20], *before, *image, *after, *text[20:]]
    return whole, slice(start, start + len(image))


FAMILIES: dict[str, Callable[[], dict[str, mx.array]]] = {
    "qwen": qwen,
    "pixtral": pixtral,
    "gemma4": gemma4,
}

if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for name, family in FAMILIES.items():
        mx.save_safetensors(str(FOLDER / f"{name}.safetensors"), family())
    models = [whole(kind) for kind in vision_models.CONFIGS]
    everything = {name: array for one in models for name, array in one.items()}
    mx.save_safetensors(str(FOLDER / "whole.safetensors"), everything)
