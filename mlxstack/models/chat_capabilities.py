"""Abilities of a model that is not loaded, from the text of its chat template."""

import re
from pathlib import Path

from mlxstack.models.model_files import accepts_images

MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
TOOLS = re.compile(r"\btools\b")
THINKING = re.compile(r"<think|enable_thinking|reasoning_content|thinking_budget|<\|channel\|>")


def capabilities(folder: Path, kv_bits: int = 16) -> tuple[str, ...]:
    """Abilities by chat template and tower, in Ollama's words.

    None of a model whose files are not here.
    """
    texts = [_beginning(folder / name) for name in TEMPLATES]
    if not any(texts):
        return ()
    source = next((text for text in texts if "messages" in text), "")
    names = ["completion"]
    if TOOLS.search(source):
        names.append("tools")
    if THINKING.search(source):
        names.append("thinking")
    if accepts_images(folder, kv_bits):
        names.append("vision")
    return tuple(names)


def _beginning(file: Path) -> str:
    """Beginning of a file's text; "" where it cannot be read."""
    try:
        if not file.is_file():
            return ""
        with file.open("rb") as opened:
            return opened.read(MAX_TEMPLATE_BYTES).decode(errors="replace")
    except OSError:
        return ""
