"""Random models that know their name: each answers with one token, whatever the prompt."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import models

STEM = 40.0
"""Length of what all embeddings share; layers add little to it."""

KINDS: dict[str, dict[str, Any]] = {
    "llama": models.LLAMA,
    "sliding": models.SLIDING,
    "experts": models.EXPERTS,
    "hybrid": models.HYBRID,
    "latent": models.LATENT,
    "sinks": models.SINKS,
}


def write(folder: Path, kind: str, token: int, seed: int) -> Path:
    """Model whose output matrix prefers `token` along the direction of every hidden state."""
    models.write(folder, KINDS[kind], seed)
    file = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = dict(mx.load(file))  # type: ignore[arg-type]
    inner = next(name for name in weights if name.endswith("embed_tokens.weight"))
    stem = mx.random.normal((weights[inner].shape[1],))
    stem = STEM * stem / mx.linalg.norm(stem)
    weights[inner] = weights[inner] + stem
    head = weights.get("lm_head.weight", weights[inner])
    head[token] = 2 * stem
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    return folder
