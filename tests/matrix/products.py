"""Product names, with the model types that mlx-lm serves them by."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_lm.utils import MODEL_REMAPPING

PRESETS = Path(__file__).parents[2] / "presets"
PRODUCTS = (
    ("Qwen3.6 35B-A3B, Qwen3.5 MoE", "qwen3_5_moe"),
    ("Qwen3.8 27B, Qwen3.6 27B, Qwen3.5", "qwen3_5"),
    ("Qwen3-Coder-Next, Qwen3-Next", "qwen3_next"),
    ("Qwen3-Coder 30B-A3B, Qwen3 MoE", "qwen3_moe"),
    ("Qwen3, Qwen3-Embedding", "qwen3"),
    ("Qwen2.5, Qwen2.5-Coder", "qwen2"),
    ("Gemma 4", "gemma4"),
    ("GPT-OSS", "gpt_oss"),
    ("GLM-4.7-Flash", "glm4_moe_lite"),
    ("GLM-4.5, 4.6 and 4.7", "glm4_moe"),
    ("GLM-5", "glm_moe_dsa"),
    ("Devstral Small 2, Ministral 3", "ministral3"),
    ("MiniMax-M2", "minimax"),
    ("Laguna", "laguna"),
    ("DeepSeek V3 and R1, Kimi K2", "deepseek_v3"),
    ("DeepSeek V3.2", "deepseek_v32"),
    ("Kimi K2.5", "kimi_k25"),
    ("LFM2 and LFM2.5", "lfm2"),
    ("Llama 3, SmolLM2", "llama"),
)
"""Names that people know, and their model type. A preset of another type needs a row."""
NOT_YET = {
    "Qwen3.8-Flash-Next 125B": "qwen4_exp",
    "DeepSeek V4": "deepseek_v4",
    "GLM-5-Next": "glm5_next",
    "Step 3.7": "step3p7",
    "K2-Horizon": "k2_horizon",
    "MiMo-V2": "mimo_v2",
}
"""Names that people look for, and types that this mlx-lm has no file for."""


def product_table(batched: Mapping[str, str]) -> str:
    """The table by product; `batched` says for each type how it is decoded."""
    headings = ("model", "type", "preset", "batched")
    presets = presets_by_type()
    rows = [
        (product, f"`{kind}`", ", ".join(presets.get(kind, ["by id"])), batched[kind])
        for product, kind in PRODUCTS
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (headings, ("---",) * len(headings), *rows)]
    missing = ", ".join(
        f"{name} ({', '.join([f'`{kind}`', *_preset_of(kind, presets)])})"
        for name, kind in NOT_YET.items()
    )
    lines += ["", f"Not in mlx-lm yet: {missing}; [mlx-vlm](#model-types-of-mlx-vlm) has them."]
    return "\n".join(lines)


def _preset_of(kind: str, presets: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"preset {name}" for name in presets.get(kind, ())]


def presets_by_type() -> dict[str, list[str]]:
    """Names of the shipped presets in code marks, by the type that serves them.

    Raises LookupError for a preset of another type.
    """
    types = {kind for _, kind in PRODUCTS} | set(NOT_YET.values())
    names = defaultdict[str, list[str]](list)
    for path in sorted((PRESETS / "configs").glob("*.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        own = config["model_type"]
        inner = config.get("text_config", {}).get("model_type", own)
        matches = types & {own, inner, MODEL_REMAPPING.get(own, own)}
        if not matches:
            raise LookupError(f"{path.name}: add a row for `{own}` to tests/matrix/products.py")
        names[min(matches)].append(f"`{path.stem}`")
    return dict(names)
