"""Product names, with the model types that mlx-lm serves them by."""

from collections.abc import Mapping

PRODUCTS = (
    ("Qwen3.6 35B-A3B, Qwen3.5 MoE", "qwen3_5_moe", "`qwen3.6-35b-a3b`"),
    ("Qwen3.8 27B, Qwen3.6 27B, Qwen3.5", "qwen3_5", "`qwen3.8-27b`, `qwen3.5-9b`, `qwen3.5-4b`"),
    ("Qwen3-Coder-Next, Qwen3-Next", "qwen3_next", "`qwen3-coder-next`"),
    ("Qwen3-Coder 30B-A3B, Qwen3 MoE", "qwen3_moe", "`qwen3-coder-30b-a3b`"),
    ("Qwen3, Qwen3-Embedding", "qwen3", "`qwen3-embedding-0.6b`"),
    ("Gemma 4", "gemma4", "`gemma4-26b-a4b`"),
    ("GPT-OSS", "gpt_oss", "`gpt-oss-20b`, `gpt-oss-120b`"),
    ("GLM-4.7-Flash", "glm4_moe_lite", "`glm-4.7-flash`"),
    ("GLM-4.5, 4.6 and 4.7", "glm4_moe", "by id"),
    ("GLM-5", "glm_moe_dsa", "by id"),
    ("Devstral Small 2, Ministral 3", "ministral3", "`devstral-small-2`"),
    ("MiniMax-M2", "minimax", "`minimax-m2`"),
    ("Laguna", "laguna", "by id"),
    ("DeepSeek V3 and R1, Kimi K2", "deepseek_v3", "by id"),
    ("DeepSeek V3.2", "deepseek_v32", "by id"),
    ("Kimi K2.5", "kimi_k25", "by id"),
    ("LFM2 and LFM2.5", "lfm2", "by id"),
    ("Llama 3, SmolLM2", "llama", "`smollm2-135m`, by id"),
)
NOT_YET = {"Qwen3.8-Flash-Next 125B": "qwen4_exp"}
"""Names that people look for, and types that this mlx-lm has no file for."""


def product_table(batched: Mapping[str, str]) -> str:
    """The table by product; `batched` says for each type how it is decoded."""
    headings = ("model", "type", "preset", "batched")
    rows = [(product, f"`{kind}`", preset, batched[kind]) for product, kind, preset in PRODUCTS]
    lines = ["| " + " | ".join(row) + " |" for row in (headings, ("---",) * len(headings), *rows)]
    missing = ", ".join(f"{name} (`{kind}`)" for name, kind in NOT_YET.items())
    lines += ["", f"Not in mlx-lm yet: {missing}."]
    return "\n".join(lines)
