"""The `content` of OpenAI's messages as text; what a text model cannot see is refused or noted."""

from typing import Any

from mlxstack.core.errors import BadRequest, Unsupported
from mlxstack.text.normalize_messages import plain_text, system_text

# What stands for the parts of other kinds where they cannot be refused any more.
NOTES = {
    "image": "[image omitted]",
    "image_url": "[image omitted]",
    "input_image": "[image omitted]",
    "input_audio": "[audio omitted]",
    "file": "[file omitted]",
    "input_file": "[file omitted]",
    "encrypted_content": "[encrypted content omitted]",
}

Content = str | list[str | dict[str, Any]] | None


def read_latest_user(content: Content, at: str) -> str:
    """What the user says now, one line per part. Raises BadRequest for what is not text."""
    try:
        return plain_text(_checked(content, at), "\n")
    except Unsupported as error:
        raise BadRequest(error.message, at) from None


def read_history(content: Content, at: str) -> str:
    """What was said earlier, or by a tool: other kinds are noted, unknown ones left out (X-6)."""
    return plain_text(_readable(_checked(content, at)), "\n")


def read_system(content: Content, at: str) -> str:
    """A system prompt, whose parts simply follow each other."""
    return system_text(_readable(_checked(content, at)))


def _checked(content: Content, at: str) -> Content:
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and not isinstance(part.get("type", "text"), str):
            raise BadRequest(f"{at}[{i}].type must be a string", f"{at}[{i}].type")
    return content


def _readable(content: Content) -> Content:
    return [_noted(part) for part in content] if isinstance(content, list) else content


def _noted(part: str | dict[str, Any]) -> str | dict[str, Any]:
    try:
        plain_text([part])
    except Unsupported:
        assert isinstance(part, dict)
        return NOTES.get(part["type"], "")
    return part
