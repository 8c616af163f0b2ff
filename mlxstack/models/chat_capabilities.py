"""Abilities of a model that is not loaded, from the text of its chat template."""

import re
from pathlib import Path

MOST_TEMPLATE_BYTES = 1 << 20
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
TOOLS = re.compile(r"\btools\b")
THINKING = re.compile(r"<think|enable_thinking|reasoning_content|thinking_budget|<\|channel\|>")


def capabilities(folder: Path) -> tuple[str, ...]:
    """Abilities that the chat template of a model names, in Ollama's words.

    None of a model whose files are not here.
    """
    texts = [_beginning(folder / name) for name in TEMPLATES]
    if not any(texts):
        return ()
    source = next((text for text in texts if "messages" in text), "")
    tools = ("tools",) if TOOLS.search(source) else ()
    return ("completion", *tools, *(("thinking",) if THINKING.search(source) else ()))


def _beginning(file: Path) -> str:
    """Beginning of a file's text; "" where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(MOST_TEMPLATE_BYTES).decode(errors="replace")
    except OSError:
        return ""
